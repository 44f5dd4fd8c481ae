"""Jobs as tasks of a Ray cluster. No shared disk: a job goes there, its result comes back; what dies is done again."""

import fcntl
import hashlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamclr
from streamclr.base.errors import UserError
from streamclr.base.files import write_bytes
from streamclr.base.progress import say
from streamclr.sweeps.job import LOG, RESULT, Job, n_seen

if TYPE_CHECKING:
    from ray import ObjectRef

N_RETRIES = 10  # of a job whose worker or machine was lost
COUNT_EVERY = 2.0  # seconds
OBJECT_STORE = 200 * 2**20  # bytes, of a Ray of our own: results are small
PATIENCE = 10.0  # seconds: for a cluster to answer, and for its tasks to stop


def need_ray(what: str) -> None:
    """To be called before the first import of Ray, which reads these then."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of a change to come
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{what} needs ray: pip install -c constraints.txt -e '.[fleet]', see docs/scale.md")


class OnRay:
    """One job is one task, with the cores and the GPU that it declares.

    address: of a cluster that is there [one of our own, on this machine and for it alone].
    workers: jobs at a time [as many as the cluster has room for].
    threads: of each job, the same everywhere, for the sums depend on it [this machine's cores among the workers].
    """

    def __init__(
        self, address: str | None, workers: int | None = None, device: str | None = None, threads: int | None = None
    ):
        n_cores = os.cpu_count() or 1
        self.threads = threads or max(1, n_cores // (workers or n_cores))
        need_ray("--on ray")
        _join(address, max(n_cores, self.threads))
        import ray

        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.device = device or ("cuda" if any(machine.get("GPU") for machine in machines) else "cpu")
        needs = {"CPU": self.threads} | ({"GPU": 1} if self.device.startswith("cuda") else {})
        room = sum(int(min(machine.get(name, 0) // n for name, n in needs.items())) for machine in machines)
        if not room:  # one may be on its way, where a cluster grows by itself
            what = " and ".join(f"{n} {name}" for name, n in needs.items())
            say(f"streamclr: no machine of the Ray cluster has room for a job of {what} now: they wait for one")
        self.name = f"Ray, {len(machines)} machine{'s' * (len(machines) != 1)}"
        self.workers, self._most = min(workers or room, room) or 1, workers
        self._sweep = secrets.token_hex(4)
        self._tasks: dict[ObjectRef, tuple[str, Path]] = {}
        resources = {"num_cpus": self.threads, "num_gpus": needs.get("GPU", 0)}
        remote: Any = ray.remote  # its types know no list of exceptions
        self._do = remote(**resources, max_retries=N_RETRIES, retry_exceptions=[Killed])(do)
        self._counts = remote(num_cpus=0, max_restarts=-1)(Counts).remote()
        self._asked = self._counts.all.remote()
        self._seen: dict[str, int] = {}

    def has_room(self) -> bool:
        return self._most is None or len(self._tasks) < self._most

    def start(self, job: Job, directory: Path) -> None:
        name = f"{self._sweep}-{job.key}"
        needs = {file: (directory.parent / file).read_bytes() for file in job.needs}
        task = self._do.remote(job, name, needs, self.threads, code_version(), self._counts)
        self._tasks[task] = name, directory

    def ended(self) -> list[tuple[Path, str]]:
        import ray

        ended = []
        ready = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)[0] if self._tasks else []
        for task in ready:
            _, directory = self._tasks.pop(task)
            try:
                where, files = ray.get(task)
            except ray.exceptions.RayError as error:  # its last line says what it was
                where, files = "", {LOG: str(error).encode()}
            for file, content in files.items():
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                write_bytes(directory / file, content)
            ended.append((directory, where))
        return ended

    @property
    def n_at_work(self) -> int:
        return sum(name in self._seen for name, _ in self._tasks.values())

    @property
    def n_seen(self) -> int:
        import ray

        if ray.wait([self._asked], timeout=0)[0]:
            with suppress(ray.exceptions.RayError):  # its machine was lost: what was counted before is true still
                self._seen |= ray.get(self._asked)
            self._asked = self._counts.all.remote()
        return sum(self._seen.get(name, 0) for name, _ in self._tasks.values())

    def stop(self) -> None:
        import ray

        for task in self._tasks:
            ray.cancel(task)
        if self._tasks:
            ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=PATIENCE)
        self._tasks.clear()


def _join(address: str | None, n_cores: int) -> None:
    """The cluster at this address, or a new one of this machine, which listens on loopback alone."""
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # one machine by itself, as Ray has it there
    import ray

    if ray.is_initialized():  # by the program that uses this one
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {"num_cpus": n_cores, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    try:
        if address not in (None, "auto"):
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), PATIENCE).close()  # Ray itself would try for minutes
        ray.init(address or "local", **options)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        where = address or "local"
        raise UserError(
            f"no Ray cluster at {where!r} ({reason}): give ray:HOST:PORT of one, or start one there"
        ) from None


@cache
def code_version() -> str:
    """What must be the same on every machine of a sweep; a checksum of the code, for versions change less often."""
    digest = hashlib.sha256()
    for file in sorted(Path(streamclr.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return f"streamclr {version('streamclr')} ({digest.hexdigest()[:8]}) with torch {version('torch')}"


class Counts:
    """An actor that knows how far each job is."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def saw(self, name: str, n_images: int) -> None:
        self._seen[name] = n_images

    def all(self) -> dict[str, int]:
        return self._seen


# ----------------------------------------------------------------------------------------------------------------------
# On a worker


class Killed(Exception):
    """The process of a job did not end by itself: it is tried again."""


def do(
    job: Job, name: str, needs: dict[str, bytes], threads: int, code: str, counts: Any
) -> tuple[str, dict[str, bytes]]:
    """A job, in a process as on any machine: where that was, and the files that are wanted of it, the result last.

    Tried again on the same machine it goes on from its last checkpoint.
    """
    where = f" on {socket.gethostname()}"
    if (own := code_version()) != code:
        return where, {LOG: f"it has {own}, and the sweep is of {code}: install the same there".encode()}
    root = Path(tempfile.gettempdir()) / f"streamclr-{name}"
    directory = root / "job"
    root.mkdir(mode=0o700, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a worker that was killed has it too, until it ends
        for file, content in needs.items():
            write_bytes(root / file, content)
        process = job.start(directory, threads, lock=lock)
        try:
            while process.poll() is None:
                counts.saw.remote(name, n_seen(directory))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(COUNT_EVERY)
        except KeyboardInterrupt:  # the sweep was stopped
            process.kill()
            process.wait()
            shutil.rmtree(root)
            raise
    if process.returncode < 0:
        raise Killed(f"its process{where} was ended by signal {-process.returncode}, again and again")
    run = [path for path in (directory / "run").rglob("*") if "checkpoints" not in path.parts] if job.keeps_run else []
    wanted = [path for path in (*run, directory / LOG, directory / RESULT) if path.is_file()]
    files = {str(path.relative_to(directory)): path.read_bytes() for path in wanted}
    shutil.rmtree(root)
    return where, files
