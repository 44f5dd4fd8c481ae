"""A deployed fleet: the server starts Flower's SuperLink, a device starts Flower's SuperNode."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from streamclr.base.errors import Stopped, UserError
from streamclr.base.files import write_bytes
from streamclr.base.progress import say
from streamclr.fleet.flower import need_flower
from streamclr.fleet.flower.bundle import bundle
from streamclr.fleet.keys import CA, SERVER
from streamclr.fleet.options import DeviceOptions, JoinOptions, ServerOptions, learner_options
from streamclr.fleet.rounds import Rounds, summary
from streamclr.records.journal import Tail
from streamclr.records.plan import open_run_stream
from streamclr.runs.service import StopSignal
from streamclr.streams.spec import absolute_source

START_SECONDS = 60.0  # for Flower to start
READ_EVERY = 0.5  # seconds between two reads of our files
MAX_READ_BYTES = 2**20  # of the journal of rounds at once
ASK_EVERY = 3.0  # seconds between two requests to Flower, which logs each of them
MIN_RESTART_SECONDS, MAX_RESTART_SECONDS = 5.0, 300.0  # pause before a SuperNode that ended is started again
UNKNOWN_KEY = "Failed to activate SuperNode"  # what Flower logs if a key is not registered


def serve(config: ServerOptions) -> int:
    """Serve the fleet until all rounds are done or it is stopped."""
    need_flower()
    config.check()
    if not 1 <= config.port <= 65535:
        raise UserError(f"port is {config.port}: use 1 to 65535")
    out = Path(config.out).absolute()
    config = replace(config, out=str(out))
    public = [] if config.insecure else _public_keys(config)
    with closing(Rounds(out, config.learner, config.of_the_rounds)) as rounds:  # reports wrong options before Flower
        if rounds.n_rounds >= config.rounds:
            raise UserError(f"{out} has {rounds.n_rounds} rounds already: give a larger --rounds to continue")
    _check_free(config)
    log = out / "flower.log"
    with (
        StopSignal() as asked,
        _flower(_superlink(config), log, out / "flower") as process,
        _control(config, process) as control,
    ):
        for key in public:
            _register(control, key)
        run_id = _start(control, config)
        who = f"{len(public)} device keys registered" if public else "insecure: without TLS and keys, anybody may join"
        say(f"serving the fleet on {config.host}:{config.port}, {who}; log: {log}")
        return _follow(control, run_id, process, asked, out)


def _public_keys(config: ServerOptions) -> list[Path]:
    if config.keys is None:
        raise UserError("--keys is missing: make them with streamclr fleet keys DIR, or give --insecure")
    directory = Path(config.keys)
    for name in (f"{CA}.crt", f"{SERVER}.crt", f"{SERVER}.key"):
        if not (directory / name).is_file():
            raise UserError(f"{directory} has no {name}: make it with streamclr fleet keys {directory}")
    if not (public := sorted(directory.glob("*.pub"))):
        raise UserError(f"{directory} has no device keys: run streamclr fleet keys {directory} --devices 3")
    return public


def _check_free(config: ServerOptions) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            where = f"{config.host}:{config.port}"
            raise UserError(f"cannot listen on {where} ({error.strerror}): give another --port") from None


def _superlink(config: ServerOptions) -> list[str]:
    command = [sys.executable, "-m", "streamclr.fleet.flower.superlink", "--disable-runtime-dependency-installation"]
    command += ["--host", config.host, "--port", str(config.port)]
    if config.insecure:
        return [*command, "--insecure"]
    directory = Path(config.keys or "").absolute()
    files = {"ssl-ca-certfile": f"{CA}.crt", "ssl-certfile": f"{SERVER}.crt", "ssl-keyfile": f"{SERVER}.key"}
    options = [word for name, file in files.items() for word in (f"--{name}", str(directory / file))]
    return [*command, "--enable-supernode-auth", *options]


@contextmanager
def _flower(command: list[str], log: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Flower process in its own process group, so that its children end with it. Its files go to `home`."""
    home.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"FLWR_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", "")])  # for its own commands
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        yield process
    finally:  # on SIGTERM a SuperNode signs off; one that is learning keeps its last checkpoint
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(10)
        process.wait()


@contextmanager
def _control(config: ServerOptions, process: subprocess.Popen[bytes]) -> Iterator[Any]:
    """A client of the SuperLink's control API, once that is up."""
    import httpx
    from flwr.proto.control_pb2 import ListRunsRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    from streamclr.fleet.flower.superlink import own_address

    root = None if config.insecure else (Path(config.keys or "") / f"{CA}.crt").read_bytes()
    address = f"{own_address(config.host)}:{config.port}"
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    until = time.monotonic() + START_SECONDS
    with ControlHttpClient.from_server_address(address, config.insecure, root, [version]) as client:
        while True:
            if process.poll() is not None:
                raise UserError(f"Flower's SuperLink ended while starting: see {Path(config.out) / 'flower.log'}")
            try:
                client.ListRuns(ListRunsRequest())
                break
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    how = f"run streamclr fleet keys NEW_DIRECTORY --host {own_address(config.host)},…"
                    raise UserError(f"the certificate in {config.keys} is not for {address}: {how}") from None
                if time.monotonic() > until:
                    raise UserError(f"Flower's SuperLink does not answer at {address} ({error})") from None
                time.sleep(READ_EVERY)
        yield client


def _register(control: Any, key: Path) -> None:
    import click
    import httpx
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.proto.control_pb2 import RegisterNodeRequest

    try:
        control.RegisterNode(RegisterNodeRequest(public_key=try_load_public_key(key)))
    except (click.ClickException, SystemExit, httpx.HTTPStatusError) as error:
        raise UserError(f"cannot register {key} ({str(error).splitlines()[0]}): make another key") from None


def _start(control: Any, config: ServerOptions) -> int:
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest

    # Without the path of the keys: this configuration goes to every device.
    shared = user_config_to_proto({"fleet": json.dumps(asdict(replace(config, keys=None)))})
    answer = control.StartRun(StartRunRequest(fab=fab_to_proto(bundle()), override_config=shared, federation=""))
    if not answer.HasField("run_id"):
        raise UserError(f"Flower did not start the rounds: see {Path(config.out) / 'flower.log'}")
    return answer.run_id


def _follow(control: Any, run_id: int, process: subprocess.Popen[bytes], asked: StopSignal, out: Path) -> int:
    """Print each new round of the journal until Flower reports the end."""
    import httpx
    from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

    journal, looked = Tail(out / "rounds.jsonl", MAX_READ_BYTES), 0.0
    journal.read()  # what was there before
    while True:
        time.sleep(READ_EVERY)
        for line in journal.read()[1]:
            done = json.loads(line)
            rejected = f" | rejected so far: {done['refused_so_far']}" if done["refused_so_far"] else ""
            say(summary(done) + rejected)
        if asked.signal:
            with suppress(httpx.HTTPError):  # it may be busy, and ends in any case
                control.StopRun(StopRunRequest(run_id=run_id))
            raise Stopped(asked.signal, f"stopped: run the same command to continue in {out}")
        if process.poll() is not None:
            raise UserError(f"Flower's SuperLink ended: see {out / 'flower.log'}")
        if time.monotonic() - looked < ASK_EVERY:
            continue
        looked = time.monotonic()
        with suppress(httpx.HTTPError):  # it may be busy
            status = control.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
            if status.status == "finished":
                if status.sub_status == "completed":
                    return 0
                raise UserError(f"the rounds ended ({status.details or status.sub_status}): see {out / 'flower.log'}")


def join(config: DeviceOptions) -> NoReturn:
    """Run until stopped. A SuperNode that ends or is refused is started again, after longer and longer pauses."""
    need_flower()
    own = _own_options(config)
    out = Path(config.out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    home = out.with_name(f"{out.name}.flower")  # the run directory itself is made in the first round
    home.mkdir(exist_ok=True)
    home.chmod(0o700)  # the source may contain a password
    write_bytes(home / "node.toml", f"device = {json.dumps(json.dumps(own))}\n".encode())
    log, pause = home / "flower.log", MIN_RESTART_SECONDS
    with StopSignal() as asked:
        while True:
            begun, size = time.monotonic(), log.stat().st_size if log.exists() else 0
            with _flower(_supernode(config, home), log, home) as process:
                say(f"joining the fleet at {config.server}; log: {log}")
                while process.poll() is None and not asked.signal:
                    time.sleep(READ_EVERY)
                code = process.returncode
            if asked.signal:
                raise Stopped(asked.signal, f"stopped: run the same command to continue in {out}")
            with log.open("rb") as file:
                file.seek(size)
                said = file.read().decode(errors="replace")
            why = f"Flower's SuperNode ended with exit code {code}, see {log}"
            if UNKNOWN_KEY in said:  # or not yet: a server that has just started is still registering keys
                why = f"the server at {config.server} does not know this device's key"
            ran_long = time.monotonic() - begun > MAX_RESTART_SECONDS
            pause = MIN_RESTART_SECONDS if ran_long else min(2 * pause, MAX_RESTART_SECONDS)
            say(f"streamclr: {why}: trying again in {pause:.0f} s")
            until = time.monotonic() + pause
            while time.monotonic() < until and not asked.signal:
                time.sleep(READ_EVERY)


def _own_options(config: DeviceOptions) -> dict[str, Any]:
    """The options of this device's learner, checked as far as possible without the server's options."""
    if config.insecure and (config.key or config.ca):
        raise UserError("both --insecure and --key or --ca are given: use --insecure alone, or leave it out")
    if not config.insecure:
        for name, value in {"key": config.key, "ca": config.ca}.items():
            if value is None:
                how = "make it with streamclr fleet keys, or give --insecure as the server does"
                raise UserError(f"--{name} is missing: {how}")
            if not Path(value).is_file():
                raise UserError(f"no file {value}: --{name} takes a file that streamclr fleet keys made")
    host, _, port = config.server.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"server is {config.server!r}: use host:port, such as 192.168.1.5:9443")
    own = {name: value for name, value in asdict(config).items() if not hasattr(JoinOptions, name)}
    own |= {"source": absolute_source(config.source), "out": str(Path(config.out).absolute())}
    open_run_stream(learner_options(asdict(ServerOptions()), own))
    return own


def _supernode(config: DeviceOptions, home: Path) -> list[str]:
    with socket.socket() as free:  # a free port for its local process
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamclr.fleet.flower.supernode", "--superlink", config.server]
    command += ["--host", "127.0.0.1", "--port", str(port), "--node-config", str(home / "node.toml")]
    keys = ["--root-certificates", str(config.ca), "--auth-supernode-private-key", str(config.key)]
    return [*command, *(["--insecure"] if config.insecure else keys)]
