"""A fleet in the field: the server with Flower's SuperLink, and a device with Flower's SuperNode."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from streamclr.base.errors import Stopped, UserError
from streamclr.base.files import write_bytes
from streamclr.base.progress import say
from streamclr.fleet.flower import need_flower
from streamclr.fleet.flower.bundle import bundle
from streamclr.fleet.keys import CA, SERVER
from streamclr.fleet.options import SHARED, DeviceOptions, ServerOptions, learner_options
from streamclr.fleet.rounds import Rounds
from streamclr.records.plan import open_run_stream
from streamclr.runs.stop import StopSignal
from streamclr.streams.spec import absolute_source

START_SECONDS = 60.0  # for Flower to come up
LOOK_EVERY, ASK_EVERY = 0.5, 3.0  # at our own files, and Flower, whose log has a line for each time
PAUSE = 5.0  # seconds before a SuperNode that ended is started again
AT_MOST = 300.0  # seconds, the longest of these pauses
REFUSED = "Failed to activate SuperNode"  # so says Flower of a key that is not registered


def serve(config: ServerOptions) -> int:
    """Until all rounds are done, or somebody stops it."""
    need_flower()
    config.check()
    if not 1 <= config.port <= 65535:
        raise UserError(f"port is {config.port}: use 1 to 65535")
    out = Path(config.out).absolute()
    config = replace(config, out=str(out))
    public = [] if config.insecure else _public_keys(config)
    with_rounds = Rounds(out, config.learner, config.of_the_rounds)  # what is wrong is said now
    done = with_rounds.n_rounds
    with_rounds.close()
    if done >= config.rounds:
        raise UserError(f"{out} has {done} rounds already: give more --rounds to go on")
    _check_free(config)
    with (
        StopSignal() as asked,
        _flower(_superlink(config), out / "flower.log", out / "flower") as process,
        _control(config, process) as control,
    ):
        for key in public:
            _register(control, key)
        run_id = _start(control, config)
        say(f"the fleet is served at {config.host}:{config.port}, {_who(public)}; log: {out / 'flower.log'}")
        return _follow(control, run_id, process, asked, out)


def _who(public: list[Path]) -> str:
    return f"{len(public)} device keys are registered" if public else "without TLS and keys: anybody may join"


def _public_keys(config: ServerOptions) -> list[Path]:
    if config.keys is None:
        raise UserError("no --keys: make them with streamclr fleet keys DIR, or give --insecure to serve anybody")
    directory = Path(config.keys)
    for name in (f"{CA}.crt", f"{SERVER}.crt", f"{SERVER}.key"):
        if not (directory / name).is_file():
            raise UserError(f"{directory} has no {name}: streamclr fleet keys {directory} makes it")
    if not (public := sorted(directory.glob("*.pub"))):
        raise UserError(f"{directory} has no public key of a device: streamclr fleet keys {directory} --devices 3")
    return public


def _check_free(config: ServerOptions) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise UserError(f"cannot listen at {config.host}:{config.port} ({error.strerror}): use another") from None


def _superlink(config: ServerOptions) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "streamclr.fleet.flower.superlink",
        "--host",
        config.host,
        "--port",
        str(config.port),
    ]
    command.append("--disable-runtime-dependency-installation")
    if config.insecure:
        return [*command, "--insecure"]
    keys = Path(config.keys or "").absolute()
    files = {"ssl-ca-certfile": f"{CA}.crt", "ssl-certfile": f"{SERVER}.crt", "ssl-keyfile": f"{SERVER}.key"}
    options = [word for name, file in files.items() for word in (f"--{name}", str(keys / file))]
    return [*command, "--enable-supernode-auth", *options]


@contextmanager
def _flower(command: list[str], log: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Flower's in a group of its own, with all that it starts; its files are with ours."""
    home.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"FLWR_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", "")])  # its own commands
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first: a SuperNode says goodbye to the SuperLink, and one that learns keeps its last checkpoint anyway."""
    for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _control(config: ServerOptions, process: subprocess.Popen[bytes]) -> Iterator[Any]:
    """Flower's control of the SuperLink, once it has come up."""
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    from streamclr.fleet.flower.superlink import own_address

    root = None if config.insecure else (Path(config.keys or "") / f"{CA}.crt").read_bytes()
    address = f"{own_address(config.host)}:{config.port}"
    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=config.insecure,
        root_certificates=root,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    from flwr.proto.control_pb2 import ListRunsRequest

    until = time.monotonic() + START_SECONDS
    try:
        while True:
            if process.poll() is not None:
                raise UserError(f"Flower's SuperLink ended at once: see {Path(config.out) / 'flower.log'}")
            try:
                client.ListRuns(ListRunsRequest())
                break
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    how = f"streamclr fleet keys NEW_DIRECTORY --host {own_address(config.host)},…"
                    raise UserError(f"the certificate in {config.keys} is not for {address}: {how}") from None
                if time.monotonic() > until:
                    raise UserError(f"Flower's SuperLink does not answer at {address} ({error})") from None
                time.sleep(LOOK_EVERY)
        yield client
    finally:
        client.close()


def _register(control: Any, key: Path) -> None:
    import click
    import httpx
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.proto.control_pb2 import RegisterNodeRequest

    try:
        control.RegisterNode(RegisterNodeRequest(public_key=try_load_public_key(key)))
    except (click.ClickException, SystemExit, httpx.HTTPStatusError) as error:
        raise UserError(f"{key} cannot be registered ({str(error).splitlines()[0]}): make another") from None


def _start(control: Any, config: ServerOptions) -> int:
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest

    fab = bundle()
    # The keys' place is nobody's business but the server's: what is in the configuration goes to every device.
    told = json.dumps(asdict(replace(config, keys=None)))
    answer = control.StartRun(
        StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto({"fleet": told}), federation="")
    )
    if not answer.HasField("run_id"):
        raise UserError("Flower did not start the rounds: see its log")
    return answer.run_id


def _follow(control: Any, run_id: int, process: subprocess.Popen[bytes], asked: StopSignal, out: Path) -> int:
    """Say what the journal of rounds says, until Flower says that it is over."""
    import httpx
    from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

    journal, position, looked = out / "rounds.jsonl", (out / "rounds.jsonl").stat().st_size, 0.0
    while True:
        time.sleep(LOOK_EVERY)
        with journal.open("rb") as file:
            file.seek(position)
            for line in file:
                if line.endswith(b"\n"):
                    position += len(line)
                    say(_told(json.loads(line)))
        if asked.signal:
            with suppress(httpx.HTTPError):  # it may be busy, and is ended in any case
                control.StopRun(StopRunRequest(run_id=run_id))
            raise Stopped(asked.signal, f"stopped: streamclr fleet server with the same options goes on in {out}")
        if process.poll() is not None:
            raise UserError(f"Flower's SuperLink ended: see {out / 'flower.log'}")
        if time.monotonic() - looked < ASK_EVERY:
            continue
        looked = time.monotonic()
        with suppress(httpx.HTTPError):  # it may be busy
            status = control.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
            if status.status == "finished" and status.sub_status == "completed":
                return 0
            if status.status == "finished":
                raise UserError(f"the rounds ended ({status.details or status.sub_status}): see {out / 'flower.log'}")


def _told(line: dict[str, Any]) -> str:
    loss = "–" if line["loss"] is None else f"{line['loss']:.3f}"
    rest = "".join(f" | {n} {what}" for what, n in (("failed", len(line["failed"])), ("silent", line["silent"])) if n)
    refused = f" | refused so far: {line['refused_so_far']}" if line["refused_so_far"] else ""
    return f"round {line['number']} | {len(line['taken'])} of {line['n_asked']} devices | loss {loss}{rest}{refused}"


# ----------------------------------------------------------------------------------------------------------------------


def join(config: DeviceOptions) -> NoReturn:
    """Until somebody stops it: a SuperNode that ends or is turned away is started again, later and later."""
    need_flower()
    own = _own_options(config)
    out = Path(config.out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    home = out.with_name(f"{out.name}.flower")  # the run directory itself is made in the first round
    home.mkdir(exist_ok=True)
    home.chmod(0o700)  # the source may have a password in it
    write_bytes(home / "node.toml", f"device = {json.dumps(json.dumps(own))}\n".encode())
    log, pause = home / "flower.log", PAUSE
    with StopSignal() as asked:
        while True:
            begun, size = time.monotonic(), log.stat().st_size if log.exists() else 0
            with _flower(_supernode(config, home), log, home) as process:
                say(f"device of the fleet at {config.server}; log: {log}")
                while process.poll() is None and not asked.signal:
                    time.sleep(LOOK_EVERY)
                code = process.returncode
            if asked.signal:
                raise Stopped(asked.signal, f"stopped: the same command goes on in {out}")
            with log.open("rb") as file:
                file.seek(size)
                said = file.read().decode(errors="replace")
            why = f"Flower's SuperNode ended with {code}, see {log}"
            if REFUSED in said:  # perhaps not yet: a server that has just started is still registering
                why = f"the server at {config.server} does not know this device's key"
            pause = PAUSE if time.monotonic() - begun > AT_MOST else min(2 * pause, AT_MOST)
            say(f"streamclr: {why}: again in {pause:.0f} s")
            until = time.monotonic() + pause
            while time.monotonic() < until and not asked.signal:
                time.sleep(LOOK_EVERY)


def _own_options(config: DeviceOptions) -> dict[str, Any]:
    """What this device's learner has of its own; checked as far as that is possible before the server speaks."""
    if config.insecure and (config.key or config.ca):
        raise UserError("both --insecure and --key or --ca are given: use --insecure alone, or leave it out")
    if not config.insecure:
        for name, value in {"key": config.key, "ca": config.ca}.items():
            if value is None:
                raise UserError(f"no --{name}: it was made by streamclr fleet keys; or --insecure, if the server is so")
            if not Path(value).is_file():
                raise UserError(f"no file {value}: --{name} is made by streamclr fleet keys")
    host, _, port = config.server.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"server is {config.server!r}: use host:port, as in 192.168.1.5:9443")
    names = ("source", "policy", "buffer", "batch", "segment", "guards", "memory", "label_budget", "seed", "out")
    own = {name: getattr(config, name) for name in names}
    own |= {"source": absolute_source(config.source), "out": str(Path(config.out).absolute())}
    defaults = asdict(ServerOptions())
    open_run_stream(learner_options({name: defaults[name] for name in SHARED}, own))
    return own


def _supernode(config: DeviceOptions, home: Path) -> list[str]:
    with socket.socket() as free:  # for its own process, which is on this machine
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamclr.fleet.flower.supernode", "--superlink", config.server]
    command += ["--host", "127.0.0.1", "--port", str(port), "--node-config", str(home / "node.toml")]
    if config.insecure:
        return [*command, "--insecure"]
    keys = ["--root-certificates", str(config.ca), "--auth-supernode-private-key", str(config.key)]
    return [*command, *keys]
