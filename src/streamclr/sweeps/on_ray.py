"""Jobs as tasks of a Ray cluster, without a shared disk: a job is sent, the result returns, a lost one is retried."""

import fcntl
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamclr.base.errors import UserError
from streamclr.base.extras import how_to_install
from streamclr.base.files import write_bytes
from streamclr.base.plugins import Plugin
from streamclr.base.progress import say
from streamclr.sweeps.job import LOG, RESULT, Job, n_seen
from streamclr.sweeps.origin import code_hash

if TYPE_CHECKING:
    from ray import ObjectRef

N_RETRIES = 10  # of a job whose worker or machine was lost
COUNT_EVERY_SECONDS = 2.0
OBJECT_STORE_BYTES = 200 * 2**20  # of a cluster that we start: results are small
TIMEOUT_SECONDS = 10.0  # for a cluster to answer, and for its tasks to stop


def need_ray(what: str) -> None:
    """Call it before the first import of Ray, which reads these variables then."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of a change to come
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{what} needs ray: {how_to_install('fleet')}, see docs/scale.md")


class OnRay:
    """One job is one task, with the cores and the GPU that it declares.

    address: of a running cluster [a new one, of this machine alone].
    workers: jobs at a time [as many as the cluster has room for].
    threads: of each job, the same everywhere, because sums depend on it [this machine's cores among the workers].
    """

    def __init__(
        self, address: str | None, workers: int | None = None, device: str | None = None, threads: int | None = None
    ):
        n_cores = os.cpu_count() or 1
        self.threads = threads or max(1, n_cores // (workers or n_cores))
        need_ray("--on ray")
        self._ray = ray = _join(address, max(n_cores, self.threads))
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.device = device or ("cuda" if any(machine.get("GPU") for machine in machines) else "cpu")
        needs = {"CPU": self.threads} | ({"GPU": 1} if self.device.startswith("cuda") else {})
        room = sum(int(min(machine.get(name, 0) // n for name, n in needs.items())) for machine in machines)
        if not room:  # a cluster that scales by itself may add a machine
            what = " and ".join(f"{n} {name}" for name, n in needs.items())
            say(f"streamclr: no machine of the Ray cluster has room for a job of {what} now: the jobs wait for one")
        self.name = f"Ray, {len(machines)} machine{'s' * (len(machines) != 1)}"
        self.workers, self._max_tasks = min(workers or room, room) or 1, workers
        self._sweep = secrets.token_hex(4)
        self._tasks: dict[ObjectRef[Any], tuple[str, Path]] = {}
        resources = {"num_cpus": self.threads, "num_gpus": needs.get("GPU", 0)}
        self._do = ray.remote(**resources, max_retries=N_RETRIES, retry_exceptions=[Killed])(do)
        self._counts = ray.remote(num_cpus=0, max_restarts=-1)(Counts).remote()
        self._asked = self._counts.all.remote()
        self._seen: dict[str, int] = {}

    def has_room(self) -> bool:
        return self._max_tasks is None or len(self._tasks) < self._max_tasks

    def start(self, job: Job, directory: Path) -> None:
        name = f"{self._sweep}-{job.key}"
        needs = {file: (directory.parent / file).read_bytes() for file in job.needs}
        task = self._do.remote(job, job.plugins, name, needs, self.threads, code_version(), self._counts)
        self._tasks[task] = name, directory

    def ended(self) -> list[tuple[Path, str]]:
        ended = []
        ready = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)[0] if self._tasks else []
        for task in ready:
            _, directory = self._tasks.pop(task)
            try:
                where, files = self._ray.get(task)
            except self._ray.exceptions.RayError as error:  # the last line is the reason
                where, files = "", {LOG: str(error).encode()}
            for file, content in files.items():
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                write_bytes(directory / file, content)
            ended.append((directory, where))
        return ended

    @property
    def n_running(self) -> int:
        return sum(name in self._seen for name, _ in self._tasks.values())

    @property
    def n_seen(self) -> int:
        if self._ray.wait([self._asked], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):  # its machine was lost: keep the counts from before
                self._seen |= self._ray.get(self._asked)
            self._asked = self._counts.all.remote()
        return sum(self._seen.get(name, 0) for name, _ in self._tasks.values())

    def stop(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task)
        if self._tasks:
            self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=TIMEOUT_SECONDS)
        self._tasks.clear()


def _join(address: str | None, n_cores: int) -> Any:
    """Join the cluster at this address, or start one on this machine that listens on loopback only. Returns Ray."""
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # one machine alone
    import ray

    if ray.is_initialized():  # by the program that calls us
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {"num_cpus": n_cores, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        if address not in (None, "auto"):
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), TIMEOUT_SECONDS).close()  # Ray itself would retry for minutes
        ray.init(address or "local", **options)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"{address or 'local'!r} ({(str(error).splitlines() or ['no reason given'])[0]})"
        raise UserError(f"no Ray cluster at {where}: give ray:HOST:PORT of a running one, or start one there") from None
    return ray


def code_version() -> str:
    """What must be the same on every machine of a sweep."""
    return f"streamclr {version('streamclr')} ({code_hash()}) with torch {version('torch')}"


class Counts:
    """An actor that knows how many images each job has learned from."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def saw(self, name: str, n_images: int) -> None:
        self._seen[name] = n_images

    def all(self) -> dict[str, int]:
        return self._seen


# ----------------------------------------------------------------------------------------------------------------------
# On a worker


class Killed(Exception):
    """The process of a job was killed: Ray tries it again."""


def do(
    job: Job, plugins: list[Plugin], name: str, needs: dict[str, bytes], threads: int, code: str, counts: Any
) -> tuple[str, dict[str, bytes]]:
    """Do a job in a process. Returns where that was, and the files that are wanted, the result last.

    Tried again on the same machine, the job continues from its last checkpoint.
    """
    where = f" on {socket.gethostname()}"
    if (own := code_version()) != code:
        return where, {LOG: f"that machine has {own}, the sweep has {code}: install the same there".encode()}
    root = Path(tempfile.gettempdir()) / f"streamclr-{name}"
    directory = root / "job"
    root.mkdir(mode=0o700, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the job of a killed worker holds it until it ends
        for file, content in needs.items():
            write_bytes(root / file, content)
        process = job.start(directory, threads, lock=lock, plugins=plugins)
        try:
            while process.poll() is None:
                counts.saw.remote(name, n_seen(directory))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(COUNT_EVERY_SECONDS)
        except KeyboardInterrupt:  # the sweep was stopped
            process.kill()
            process.wait()
            shutil.rmtree(root)
            raise
    if process.returncode < 0:
        raise Killed(f"its process{where} was killed by signal {-process.returncode} in every attempt")
    run = [path for path in (directory / "run").rglob("*") if "checkpoints" not in path.parts] if job.keeps_run else []
    wanted = [path for path in (*run, directory / LOG, directory / RESULT) if path.is_file()]
    files = {str(path.relative_to(directory)): path.read_bytes() for path in wanted}
    shutil.rmtree(root)
    return where, files
