"""Metrics of a run for Prometheus, served on the loopback address in text format 0.0.4."""

import math
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.options import redacted
from streamclr.compute.memory import resident
from streamclr.step import Step
from streamclr.streams.account import Account


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str  # counter or gauge
    help: str
    label: str = ""  # name of its one label, if it has one


METRICS = (
    Metric("streamclr_up", "gauge", "1 while the process runs."),
    Metric("streamclr_steps_total", "counter", "Steps of the run, including those before a restart."),
    Metric("streamclr_images_learned_total", "counter", "Frames that the model learned from."),
    Metric("streamclr_frames_received_total", "counter", "Frames from all sources: learned, passed over or rejected."),
    Metric("streamclr_frames_passed_total", "counter", "Good frames that were passed over, by reason.", "reason"),
    Metric("streamclr_frames_rejected_total", "counter", "Frames that could not be decoded, by reason.", "reason"),
    Metric("streamclr_predictions_total", "counter", "Frames that were classified on arrival."),
    Metric("streamclr_answers_sent_total", "counter", "Answers that have arrived at a destination.", "destination"),
    Metric("streamclr_answers_dropped_total", "counter", "Answers that will never arrive there.", "destination"),
    Metric("streamclr_answers_waiting", "gauge", "Answers that wait for a destination.", "destination"),
    Metric("streamclr_destination_connected", "gauge", "1 while it can be reached, else 0.", "destination"),
    Metric("streamclr_served_version", "gauge", "Version of the classifier in use; 0 before the first."),
    Metric("streamclr_served_accuracy", "gauge", "Accuracy of that version on labels held back; NaN if unknown."),
    Metric("streamclr_challengers_total", "counter", "New heads since the process started, by verdict.", "verdict"),
    Metric("streamclr_loss", "gauge", "Contrastive loss of the last step."),
    Metric("streamclr_score_mean", "gauge", "Mean score in the buffer; NaN if the policy does not score."),
    Metric("streamclr_projection_spread", "gauge", "Spread of the projections; near 0, the encoder has collapsed."),
    Metric("streamclr_replaced_ratio", "gauge", "Share of the buffer that the last step replaced."),
    Metric("streamclr_rescored_ratio", "gauge", "Share of the buffer that the last step scored again."),
    Metric("streamclr_step_seconds", "gauge", "Duration of the last step, by phase.", "phase"),
    Metric("streamclr_checkpoint_step", "gauge", "Step of the last checkpoint on disk."),
    Metric("streamclr_checkpoint_failures_total", "counter", "Checkpoints that could not be written."),
    Metric("streamclr_steps_undone_total", "counter", "Steps that were undone because their numbers were not finite."),
    Metric("streamclr_source_connected", "gauge", "1 while the source delivers frames, else 0.", "source"),
    Metric("streamclr_source_disconnects_total", "counter", "How often the source was disconnected.", "source"),
    Metric("streamclr_resident_memory_bytes", "gauge", "Resident memory of the process."),
)
PREFIX = "streamclr_"
Value = float | Mapping[str, float]  # a number, or a number for each label value


def of_account(account: Account) -> dict[str, Value]:
    """Values for `Metrics.update` from the account of frames."""
    return {
        "images_learned_total": account.learned,
        "frames_received_total": account.received,
        "frames_passed_total": dict(account.passed),
        "frames_rejected_total": dict(account.rejected),
        "predictions_total": account.predicted,
    }


def of_answers(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Value]:
    """Values for `Metrics.update` from what became of the answers, by destination."""
    names = {f"answers_{name}_total": name for name in ("sent", "dropped")}
    names |= {"answers_waiting": "waiting", "destination_connected": "connected"}
    return {metric: {to: float(counts[name]) for to, counts in state.items()} for metric, name in names.items()}


def of_served(about: Mapping[str, Any] | None) -> dict[str, Value]:
    """Values for `Metrics.update` about the classifier in use, if there is one."""
    about = about or {"version": 0, "accuracy": None}
    accuracy = math.nan if about["accuracy"] is None else about["accuracy"]
    return {"served_version": about["version"], "served_accuracy": accuracy}


def of_step(step: Step) -> dict[str, Value]:
    """Values for `Metrics.update` from a step."""
    return {
        "steps_total": step.number,
        "loss": step.loss,
        "score_mean": step.score,
        "projection_spread": step.spread,
        "replaced_ratio": step.replaced / max(1, step.kept + step.replaced),
        "rescored_ratio": step.rescored,
        "step_seconds": {"scoring": step.seconds_scoring, "training": step.seconds_training},
    }


class Metrics:
    """Serves http://127.0.0.1:PORT/metrics from its own thread until it is closed. Port 0 picks a free port."""

    def __init__(self, port: int):
        if not 0 <= port <= 65535:
            raise UserError(f"metrics is {port}: use a port from 1 to 65535, or 0 for any free port")
        self._values: dict[str, dict[str, float]] = {}  # by name and label value, "" if it has no label
        self._lock = threading.Lock()
        self.update(up=1)
        try:
            self._server = _Server(port, self)
        except OSError as error:
            raise UserError(
                f"cannot serve metrics on port {port} of 127.0.0.1 ({error.strerror}): "
                "give another port, or --metrics 0 for any free port"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def update(self, **values: Value) -> None:
        """Set values by name, without the prefix: `update(loss=4.8, frames_passed_total={"late": 3})`.

        A metric with a label keeps the label values that are not given.
        """
        with self._lock:
            for name, value in values.items():
                if isinstance(value, Mapping) != bool(_LABELS[name]):
                    raise TypeError(f"{name} is {value!r}: give {'a mapping' if _LABELS[name] else 'a number'}")
                given = value if isinstance(value, Mapping) else {"": value}
                self._values[name] = self._values.get(name, {}) | {redacted(label): n for label, n in given.items()}

    def text(self) -> str:
        """The page. Metrics without a value are left out: a 0 before a run resumes would look like a counter reset."""
        with suppress(UserError):  # this system does not report it
            self.update(resident_memory_bytes=resident())
        with self._lock:
            known = dict(self._values)
        lines = []
        for metric in METRICS:
            if values := known.get(metric.name.removeprefix(PREFIX)):
                lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
                for label, value in values.items():
                    labels = f'{{{metric.label}="{_escaped(label)}"}}' if metric.label else ""
                    lines.append(f"{metric.name}{labels} {_number(value)}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_LABELS = {metric.name.removeprefix(PREFIX): metric.label for metric in METRICS}
MAX_CLIENTS = 4  # at a time
CLIENT_SECONDS = 5.0  # for one request and its answer
HOSTS = ("127.0.0.1", "localhost", "[::1]")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(int(value))


class _Server(ThreadingTCPServer):
    """Serves few clients at a time, each for a few seconds, so that a stuck client blocks nothing.

    Not http.server.HTTPServer, which looks up the name of 127.0.0.1 in DNS when it starts.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, metrics: Metrics):
        self.metrics = metrics
        self._deadlines: dict[socket.socket, float] = {}  # by client
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._deadlines) >= MAX_CLIENTS:
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + CLIENT_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second. A socket timeout is not enough: a client can reset it with one byte at a time."""
        for request, deadline in list(self._deadlines.items()):
            if time.monotonic() > deadline:
                with suppress(OSError):  # already closed
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that disconnects is not an error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "streamclr", ""

    def do_GET(self) -> None:
        # Against DNS rebinding: a foreign page whose name resolves to this machine sends that name as Host.
        hosts = [host.lower() for host in self.headers.get_all("Host", [])]
        if len(hosts) != 1 or (hosts[0] not in HOSTS and hosts[0].rpartition(":")[0] not in HOSTS):
            self._answer(403, "Host header not allowed; use 127.0.0.1 or localhost\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, "not found; use /metrics\n")
        else:
            self._answer(200, self.server.metrics.text())

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self._answer(405, "method not allowed; use GET or HEAD\n")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method

    def _answer(self, status: int, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No log: Prometheus asks every few seconds for weeks."""
