"""What a fleet costs: bytes of an update in fp32, fp16 and int8, updates that the server averages in a second, and
devices that a whole server with Flower, TLS and keys can serve.

    python benchmarks/fleet.py [WIDTH:DEVICES …]    # servers to measure; without arguments all, in 15 minutes

The devices are simulated in one process: each sends what a SuperNode sends, with Flower's own code, and answers with
weights made before. They share the cores with the server, so the CPU time of the server's processes means more than the
wall time. Linux only.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from streamclr.base.errors import UserError
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import resnet18
from streamclr.fleet.average import Average, Update, Weights, exchanged
from streamclr.fleet.flower import need_flower
from streamclr.fleet.keys import make_keys
from streamclr.fleet.options import KeysOptions
from streamclr.fleet.rounds import read_rounds

STEMS = {8: "half", 16: "small", 64: "small"}
N_UPDATES = {8: 200, 16: 100, 64: 8}
SERVERS = ((8, 10), (8, 50), (8, 100), (8, 200), (64, 10), (64, 50))
N_ASKING = 16  # of the idle devices ask without a pause: enough to keep a server busy, and not its app from being heard
ASK_SECONDS = 10.0
PAUSE = 3.0  # a SuperNode's, when there is none
ROUNDS = 2  # the first warms up, the second is measured
MOST_SECONDS = 600.0
TICKS = os.sysconf("SC_CLK_TCK")


def weights_of(width: int) -> Weights:
    torch.manual_seed(0)
    return exchanged(ContrastiveModel(resnet18(width, STEMS[width])))


# ----------------------------------------------------------------------------------------------------------------------
# Sizes, and the average alone


def int8(delta: torch.Tensor) -> bytes:
    """Eight bits and a scale for each tensor."""
    scale = delta.abs().max().clamp(min=1e-12) / 127
    return (delta / scale).round().to(torch.int8).numpy().tobytes() + scale.numpy().tobytes()


def sizes() -> None:
    print("| encoder | values | fp32, MB | fp16 delta, MB | int8 delta, MB | int8, deflated, MB | updates a second |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for width, n_updates in N_UPDATES.items():
        weights = weights_of(width)
        # A step of Adam moves every weight by about its learning rate; how well noise deflates is the worst case.
        deltas = {name: 3e-3 * torch.randn_like(tensor) for name, tensor in weights.items()}
        n_values = sum(tensor.numel() for tensor in weights.values())
        fp16 = sum(len(delta.half().numpy().tobytes()) for delta in deltas.values())
        packed = [int8(delta) for delta in deltas.values()]
        update = {name: (tensor + deltas[name]).abs() for name, tensor in weights.items()}
        average = Average(weights)
        updates = [Update(str(number), update, 1) for number in range(n_updates)]
        started = time.perf_counter()
        average.take(updates)
        rate = n_updates / (time.perf_counter() - started)
        bytes_of = (4 * n_values, fp16, sum(map(len, packed)), sum(len(zlib.compress(part)) for part in packed))
        row = " | ".join(f"{size / 1e6:.2f}" for size in bytes_of)
        print(f"| ResNet-18, width {width} | {n_values:,} | {row} | {rate:.0f} |", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# The devices


class Devices:
    """All devices of a fleet in one process: those that wait, those that ask without a pause, those that learn."""

    def __init__(self, address: str, keys: Path, width: int, n: int):
        self.address, self.keys, self.width, self.n = address, keys, width, n
        spawn = multiprocessing.get_context("spawn")
        self.joined, self.calls = spawn.Value("i", 0), spawn.Value("i", 0)
        self.ask, self.work = spawn.Event(), spawn.Event()
        self.process = spawn.Process(target=self.live, daemon=True)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "process"}

    def live(self) -> None:
        need_flower()
        torch.set_num_threads(1)
        weights = weights_of(self.width)
        for number in range(1, self.n + 1):
            threading.Thread(target=self.device, args=(number, weights), daemon=True).start()
        threading.Event().wait()

    def device(self, number: int, weights: Weights) -> None:
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supernode.fleet_http_connection import http_request_response

        key = load_ssh_private_key((self.keys / f"device-{number:04}").read_bytes(), None)
        if number == self.n:  # without the last of them no round begins
            self.work.wait()
        root = (self.keys / "ca.crt").read_bytes()
        with http_request_response(self.address, False, root, (key, key.public_key())) as (_, receive, *rest):
            with self.joined.get_lock():
                self.joined.value += 1
            while not self.work.is_set():
                assert receive() is None
                with self.calls.get_lock():
                    self.calls.value += 1
                self.work.wait(0 if self.ask.is_set() and number <= N_ASKING else PAUSE)
            while True:
                if (received := receive()) is None:
                    time.sleep(PAUSE)
                else:
                    self.answer(number, weights, *received, *rest)

    def answer(self, number, weights, message, tree, send, get_run, get_fab, pull_object, push_object, confirm) -> None:
        """What a SuperNode and its app do with a message, but for the learning."""
        from flwr.app import Message, MetricRecord, RecordDict
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            iterate_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_utils import pull_objects, push_objects

        from streamclr.fleet.strategy import as_record

        run_id = message.metadata.run_id
        pull_objects([each.object_id for each in iterate_object_tree(tree)], partial(pull_object, run_id))
        confirm(run_id, message.metadata.message_id)
        # Flower stores what is the same once: every device must have learned something else.
        learned = {name: tensor + number * 1e-6 for name, tensor in weights.items()}
        metrics = MetricRecord({"num-examples": 1, "loss": 1.0})
        reply = Message(RecordDict({"arrays": as_record(learned), "metrics": metrics}), reply_to=message)
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id  # as a SuperNode does
            missing, session = send(reply, get_object_tree(reply), 0.0)
            push = partial(push_object, run_id, session)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=missing)


# ----------------------------------------------------------------------------------------------------------------------
# The whole server


class Processes:
    """CPU seconds and peak memory of a server's processes, by what they are."""

    def __init__(self, server: int, devices: int):
        self.server, self.devices, self.peak = server, devices, Counter()

    def cpu(self) -> Counter:
        found = Counter()
        for kind, pid in self.found():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:  # it has just ended
                continue
            found[kind] += (int(fields[11]) + int(fields[12])) / TICKS
            if "VmHWM:" in status:
                self.peak[kind] = max(self.peak[kind], int(status.split("VmHWM:")[1].split()[0]) / 1e3)
        return found

    def found(self) -> list[tuple[str, int]]:
        below, kinds = [self.server], [("devices", self.devices)]
        for pid in below:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
                tasks = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
            except OSError:
                continue
            below += map(int, " ".join(tasks).split())
            if "streamclr.fleet.flower.superlink" in command:
                kinds.append(("SuperLink", pid))
            elif "flwr-serverapp" in command:
                kinds.append(("app", pid))
        return kinds


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def whole_server(width: int, n: int, place: Path) -> str:
    """A row of the table."""
    keys, out, port = place / "keys", place / "server", free_port()
    make_keys(KeysOptions(str(keys), devices=n))
    options = {"keys": keys, "out": out, "port": port, "width": width, "stem": STEMS[width], "size": 32}
    options |= {"min-devices": n, "rounds": ROUNDS + 1, "round-images": 1, "deadline": MOST_SECONDS}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    devices = Devices(f"127.0.0.1:{port}", keys, width, n)
    with (place / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "streamclr", "fleet", "server", *words]
        server = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(until, what: str) -> None:
        end = time.monotonic() + MOST_SECONDS
        while not until():
            processes.cpu()
            if server.poll() is not None or time.monotonic() > end:
                raise UserError(f"no {what} with {n} devices: {(place / 'server.log').read_text()[-500:]}")
            time.sleep(0.05)

    try:
        processes = Processes(server.pid, 0)
        wait(lambda: b"is served" in (place / "server.log").read_bytes(), "server")
        devices.process.start()
        processes.devices = devices.process.pid
        wait(lambda: devices.joined.value == n - 1, "devices")
        devices.ask.set()
        before, n_before, started = processes.cpu(), devices.calls.value, time.monotonic()
        time.sleep(ASK_SECONDS)
        seconds, calls, used = time.monotonic() - started, devices.calls.value - n_before, processes.cpu() - before
        devices.work.set()
        idle = [f"{calls / seconds:.0f}", f"{1e3 * used['SuperLink'] / calls:.1f}"]
        say(f"  {calls / seconds:.0f} calls a second; of a core: {shares(used, seconds)}")

        def done(n_rounds: int) -> bool:
            return (out / "rounds.jsonl").exists() and len(read_rounds(out)) >= n_rounds

        wait(lambda: done(1), "first round")
        before, started = processes.cpu(), time.monotonic()
        say("  one round done")
        wait(lambda: done(ROUNDS), "round")
        seconds, used = (time.monotonic() - started) / (ROUNDS - 1), processes.cpu() - before
        n_taken = len(read_rounds(out)[ROUNDS - 1]["taken"])
    finally:
        if devices.process.pid:
            devices.process.kill()
        server.send_signal(signal.SIGTERM)
        server.wait()
    figures = [f"{width}", f"{n_taken} of {n}", f"{seconds:.1f}", f"{n_taken / seconds:.1f}"]
    for kind in ("SuperLink", "app"):
        figures += [f"{used[kind] / n_taken:.2f}", f"{processes.peak[kind]:.0f}"]
    return "| " + " | ".join([*figures, *idle, shares(used, seconds)]) + " |"


def shares(used: Counter, seconds: float) -> str:
    return ", ".join(f"{kind} {100 * used[kind] / seconds:.0f} %" for kind in ("SuperLink", "app", "devices"))


HEAD = (
    "width | devices | seconds a round | updates a second | SuperLink: CPU s an update | peak MB | app: CPU s an update"
)
HEAD += " | peak MB | idle: calls a second | SuperLink: CPU ms a call | of a core in the round"


def servers(which: list[tuple[int, int]]) -> None:
    print(f"| {HEAD} |\n|" + "---:|" * (1 + HEAD.count("|")), flush=True)
    for width, n in which:
        say(f"width {width}, {n} devices")
        with tempfile.TemporaryDirectory() as place:
            try:
                print(whole_server(width, n, Path(place)), flush=True)
            except UserError as error:
                say(f"  {error}")


def main() -> None:
    if "--help" in sys.argv:
        print(__doc__)
        return
    which = [tuple(map(int, word.split(":"))) for word in sys.argv[1:]]
    if not which:
        sizes()
        print()
    servers(which or list(SERVERS))


if __name__ == "__main__":
    main()
