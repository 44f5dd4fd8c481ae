"""The figures of a run for Prometheus: a page on this machine's loopback address, in text format 0.0.4."""

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
from streamclr.learner import Step
from streamclr.streams.account import Account


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str  # counter or gauge
    help: str
    label: str = ""  # the one label that its values are told apart by


METRICS = (
    Metric("streamclr_up", "gauge", "1 while the process runs."),
    Metric("streamclr_steps_total", "counter", "Steps of the run, those before a restart included."),
    Metric("streamclr_images_learned_total", "counter", "Frames that were learned from."),
    Metric("streamclr_frames_received_total", "counter", "Frames from all sources: learned, passed over or rejected."),
    Metric("streamclr_frames_passed_total", "counter", "Whole frames that were not used.", "reason"),
    Metric("streamclr_frames_rejected_total", "counter", "What was no frame that can be used.", "reason"),
    Metric("streamclr_predictions_total", "counter", "Frames that were classified as they came."),
    Metric("streamclr_served_version", "gauge", "Number of the version that classifies them; 0 before the first."),
    Metric("streamclr_served_accuracy", "gauge", "Its share of right answers on the labels held back; NaN if none."),
    Metric("streamclr_challengers_total", "counter", "New heads of this process, by what became of them.", "verdict"),
    Metric("streamclr_loss", "gauge", "Contrastive loss of the last step."),
    Metric("streamclr_score_mean", "gauge", "Mean score in the buffer; NaN for a policy that does not score."),
    Metric("streamclr_projection_spread", "gauge", "Spread of the projections; near 0 the encoder has collapsed."),
    Metric("streamclr_replaced_ratio", "gauge", "Share of the buffer that the last step replaced."),
    Metric("streamclr_rescored_ratio", "gauge", "Share of the buffer that the last step scored again."),
    Metric("streamclr_step_seconds", "gauge", "Duration of the last step.", "phase"),
    Metric("streamclr_checkpoint_step", "gauge", "Step of the last checkpoint on the disk."),
    Metric("streamclr_checkpoint_failures_total", "counter", "Checkpoints that could not be written."),
    Metric("streamclr_steps_undone_total", "counter", "Steps that were taken back, because they did harm."),
    Metric("streamclr_source_connected", "gauge", "1 while frames come from the source, else 0.", "source"),
    Metric("streamclr_source_disconnects_total", "counter", "How often the source was lost.", "source"),
    Metric("streamclr_resident_memory_bytes", "gauge", "Memory that the process has."),
)
PREFIX = "streamclr_"
Value = float | Mapping[str, float]  # a number, or one for each value of the label


def of_account(account: Account) -> dict[str, Value]:
    """What `Metrics.update` takes, from the account of frames."""
    return {
        "images_learned_total": account.learned,
        "frames_received_total": account.received,
        "frames_passed_total": dict(account.passed),
        "frames_rejected_total": dict(account.rejected),
        "predictions_total": account.predicted,
    }


def of_served(about: Mapping[str, Any] | None) -> dict[str, Value]:
    """The same from what is known of the version that is served, if there is one."""
    about = about or {"version": 0, "accuracy": None}
    accuracy = about["accuracy"]
    return {"served_version": about["version"], "served_accuracy": math.nan if accuracy is None else accuracy}


def of_step(step: Step) -> dict[str, Value]:
    """The same from a step."""
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
    """Serves http://127.0.0.1:PORT/metrics from a thread of its own until it is closed. Port 0 takes a free one."""

    def __init__(self, port: int):
        if not 0 <= port <= 65535:
            raise UserError(f"metrics is {port}: use a port from 1 to 65535, or 0 for a free one")
        self._values: dict[str, float | dict[str, float]] = {}
        self._lock = threading.Lock()
        self.update(up=1)
        try:
            self._server = _Server(port, self)
        except OSError as error:
            raise UserError(
                f"cannot serve metrics on port {port} of 127.0.0.1 ({error.strerror}): give another port, "
                "or --metrics 0 for a free one"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def update(self, **values: Value) -> None:
        """Set values by name, without the prefix: `update(loss=4.8, frames_passed_total={"late": 3})`.

        What has a label keeps the values of the labels that are not named.
        """
        for name, value in values.items():
            if isinstance(value, Mapping) != bool(_LABELS[name]):
                raise TypeError(f"{name} is {value!r}: {'a mapping' if _LABELS[name] else 'a number'} is due")
        with self._lock:
            for name, value in values.items():
                if isinstance(value, Mapping):
                    value = {**self._of_label(name), **{redacted(label): n for label, n in value.items()}}
                self._values[name] = value

    def _of_label(self, name: str) -> dict[str, float]:
        values = self._values.get(name, {})
        assert isinstance(values, dict)
        return values

    def text(self) -> str:
        """The page. What has no value yet is left out: a 0 before a run goes on would look like a loss of count."""
        with suppress(UserError):  # a system that does not tell
            self.update(resident_memory_bytes=resident())
        with self._lock:
            values = dict(self._values)
        lines = []
        for metric in METRICS:
            value = values.get(metric.name.removeprefix(PREFIX), {})
            if value != {}:
                lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            if isinstance(value, dict):
                lines += [f'{metric.name}{{{metric.label}="{_escaped(k)}"}} {_number(n)}' for k, n in value.items()]
            else:
                lines.append(f"{metric.name} {_number(value)}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_LABELS = {metric.name.removeprefix(PREFIX): metric.label for metric in METRICS}
N_CLIENTS = 4  # at a time
SECONDS = 5.0  # that a client may take for its request and our answer
HOSTS = ("127.0.0.1", "localhost", "[::1]")


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(int(value))


class _Server(ThreadingTCPServer):
    """A few clients at a time, and each for a few seconds, so that one that is stuck holds nothing up.

    Not http.server's own: that one asks the name server who 127.0.0.1 is.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, metrics: Metrics):
        self.metrics = metrics
        self._until: dict[socket.socket, float] = {}  # the clients, and when their time is over
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._until) >= N_CLIENTS:
            self.shutdown_request(request)
            return
        self._until[request] = time.monotonic() + SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second. A timeout of the socket would not do: one byte now and then keeps it from ending."""
        for request, until in list(self._until.items()):
            if time.monotonic() > until:
                with suppress(OSError):  # just gone by itself
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that went away is none
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "streamclr", ""

    def do_GET(self) -> None:
        # A page from elsewhere whose name was made to point at this machine would send its own name (DNS rebinding).
        hosts = [host.lower() for host in self.headers.get_all("Host", [])]
        if len(hosts) != 1 or (hosts[0] not in HOSTS and hosts[0].rpartition(":")[0] not in HOSTS):
            self._answer(403, "only for this machine: ask for 127.0.0.1 or localhost\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, "there is only /metrics\n")
        else:
            self._answer(200, self.server.metrics.text())

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._answer(405, "only GET and HEAD\n")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

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
        """A request every few seconds for weeks is nothing to tell."""
