"""Sweeps on Ray, where it is installed: one of this machine, its workers killed, and one that was there before."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from streamclr import UserError
from streamclr.cli.entry import main
from streamclr.records.checkpoints import Checkpoints
from streamclr.sweeps import on_ray as cluster
from streamclr.sweeps.job import RESULT, Job
from streamclr.sweeps.places import open_place, work
from support.plugins import at_home, forget

TINY = "--buffer 16 --width 2 --stem small --fractions 1 --classifier linear --probes 2".split()

STEP = ("number", "seen", "loss", "kept", "replaced", "rescored", "score", "spread", "classes", "accuracy")


@pytest.fixture(scope="module")
def ray_here():
    """A Ray of this machine's own, and where its workers keep what they are at."""
    ray = pytest.importorskip("ray")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="streamclr-test-", ignore_cleanup_errors=True) as temporary,
    ):
        here = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", here)
        patch.setenv("TMPDIR", temporary)
        patch.setenv("RAY_TMPDIR", "/tmp")  # a longer path would be too long for its sockets
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster.OnRay(None, device="cpu")
        yield Path(temporary)
        ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Four classes of coloured noise, which take no time to evaluate on."""
    path, rng = tmp_path_factory.mktemp("source"), np.random.default_rng(0)
    for part, n in (("train", 20), ("val", 5)):
        for label in range(4):
            (folder := path / part / f"class{label}").mkdir(parents=True)
            for number in range(n):
                pixels = rng.integers(0, 120, (8, 8, 3)) + np.array([label % 2, label // 2, 1]) * 60
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    return f"folder:{path}?stc=5"


@pytest.fixture
def job(tmp_path):
    """Makes jobs of `support.sweep_jobs`."""
    return lambda function, name, **rest: Job(
        name, function, f"support.sweep_jobs:{function}", {"images": 10, "told": str(tmp_path), "name": name}, **rest
    )


def tries(file):
    return file.read_text().split() if file.exists() else []


def compared(out, source, *words):
    """What a comparison came to, and each run of it step by step, but for what is the machine's."""
    assert main(["compare", "--source", source, *TINY, *words, "--out", str(out)]) == 0
    journals = {}
    for file in sorted(out.glob("*/journal.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        journals[file.parent.name] = [{name: line[name] for name in STEP if name in line} for line in lines]
    return (out / "table.md").read_text(), json.loads((out / "results.json").read_text())["accuracy"], journals


def test_the_table_is_the_local_one(ray_here, source, tmp_path):
    words = [source, "--policies", "contrast?precision=fp32,fifo", "--seeds", "1", "--images", "64"]
    there, here = compared(tmp_path / "there", *words, "--on", "ray"), compared(tmp_path / "here", *words)
    assert there == here
    assert list(here[2]) == ["contrast,precision=fp32-0", "fifo-0"]
    files = [{path.name for path in (tmp_path / at / "fifo-0").iterdir()} for at in ("there", "here")]
    assert files[1] - files[0] == {"checkpoints"}
    assert not (tmp_path / "there" / "jobs").exists()
    assert not list(ray_here.glob("streamclr-*"))


def test_a_policy_and_a_loss_of_a_researcher_are_sent_along(ray_here, source, tmp_path, monkeypatch):
    """The workers were started before its directory was known, as on another machine: they get its source."""
    at_home(tmp_path / "home", monkeypatch)
    words = [source, "--policies", "mine:Brightest?share=0.5", "--seeds", "1", "--images", "64"]
    words += ["--loss", "mine:decorrelated?weight=2"]
    there, here = compared(tmp_path / "there", *words, "--on", "ray"), compared(tmp_path / "here", *words)
    forget("mine")
    assert there == here
    hashes = [(tmp_path / at / "mine.Brightest,share=0.5-0/plugins.json").read_text() for at in ("there", "here")]
    assert hashes[0] == hashes[1]


@pytest.mark.long
def test_a_worker_and_a_process_killed_in_the_middle_change_nothing(ray_here, source, tmp_path):
    words = f"{source} --policies contrast?precision=fp32,fifo --seeds 1 --images 4800 --checkpoint-steps 50".split()
    killed, gone_on = [], set()

    def kill():
        """The Ray worker of the first job that has a checkpoint, and the process of the second itself."""
        while not over.wait(0.05):
            for directory in ray_here.glob("streamclr-*/job"):
                with contextlib.suppress(OSError):
                    if "going on after step" in (directory / "log.txt").read_text():
                        gone_on.add(directory)
                if len(killed) < 2 and directory not in killed and Checkpoints(directory / "run/checkpoints").numbers():
                    with contextlib.suppress(OSError):  # it ended at this moment
                        for pid in processes(directory):
                            os.kill(pid if killed else parent(pid), signal.SIGKILL)
                            killed.append(directory)

    over = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        there = compared(tmp_path / "there", *words, "--on", "ray")
    finally:
        over.set()
        killer.join()
    assert len(killed) == 2
    assert gone_on >= set(killed)  # from a checkpoint, not from the beginning
    assert not list(ray_here.glob("streamclr-*"))
    assert there == compared(tmp_path / "here", *words)


def processes(directory):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory) in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
    return found


def parent(pid):
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_what_dies_is_tried_again_where_it_was_and_what_fails_is_not(ray_here, tmp_path, job):
    place, out = cluster.OnRay(None, device="cpu"), tmp_path / "out"
    out.mkdir()
    (out / "beside.txt").write_text("sent along")
    kept = []
    jobs = {out / "died": job("die_once", "died"), out / "done": job("count", "done", needs=("beside.txt",))}
    work(jobs, place, lambda directory: kept.append(json.loads((directory / RESULT).read_text())))
    assert {"half": True}.items() <= next(result for result in kept if "half" in result).items()
    assert next(result for result in kept if "name" in result)["beside"] == "sent along"
    assert (len(tries(tmp_path / "died")), len(tries(tmp_path / "done"))) == (2, 1)
    with pytest.raises(UserError, match=rf"failed-\w+ failed on {socket.gethostname()} \(failed cannot be done\): see"):
        work({out / "failed": job("fail", "failed")}, place, kept.append)
    assert len(tries(tmp_path / "failed")) == 1
    assert len(kept) == 2
    assert not list(ray_here.glob("streamclr-*"))


def test_stopped_it_keeps_what_is_done_and_leaves_nothing_behind(ray_here, tmp_path, job):
    place, kept = cluster.OnRay(None, device="cpu"), []

    def interrupt(directory):
        kept.append(directory.name)
        while not tries(tmp_path / "asleep"):
            time.sleep(0.1)
        raise KeyboardInterrupt

    jobs = {tmp_path / "out" / "a": job("sleep", "asleep"), tmp_path / "out" / "b": job("count", "done")}
    with pytest.raises(KeyboardInterrupt):
        work(jobs, place, interrupt)
    assert kept == ["b"]
    (pid,) = tries(tmp_path / "asleep")
    assert not Path(f"/proc/{pid}").exists()
    assert not list(ray_here.glob("streamclr-*"))


def test_other_code_on_a_worker_is_said(ray_here, tmp_path, job, monkeypatch):
    place = cluster.OnRay(None, device="cpu")
    monkeypatch.setattr(cluster, "code_version", lambda: "streamclr 9.9")
    with pytest.raises(UserError, match=r"that machine has streamclr .*, the sweep has streamclr 9.9: install"):
        work({tmp_path / "out": job("count", "begun")}, place, lambda directory: None)
    assert not tries(tmp_path / "begun")


@pytest.mark.system
def test_it_listens_on_loopback_alone():
    pytest.importorskip("ray")
    code = """
import json
from streamclr.sweeps.on_ray import OnRay
OnRay(None)
import ray
(node,) = ray.nodes()
ports = [node["NodeManagerPort"], node["ObjectManagerPort"]]
ports.append(int(ray.get_runtime_context().gcs_address.rpartition(":")[2]))
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
listening = [line[1].split(":") for line in lines if line[3] == "0A"]
print(json.dumps([[address for address, number in listening if int(number, 16) == port] for port in ports]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    addresses = json.loads(done.stdout)
    assert len(addresses) == 3
    assert all(own and {address[-8:] for address in own} == {"0100007F"} for own in addresses)  # 127.0.0.1


def test_threads_and_gpus_are_declared(ray_here, capsys):
    place = cluster.OnRay(None, workers=1, device="cpu")
    assert (place.threads, place.workers, place.name) == (os.cpu_count(), 1, "Ray, 1 machine")
    assert not capsys.readouterr().err
    place = cluster.OnRay(None, device="cuda", threads=1)
    assert "no machine of the Ray cluster has room for a job of 1 CPU and 1 GPU now" in capsys.readouterr().err
    assert place.workers == 1


@pytest.mark.long
def test_a_cluster_that_was_there(source, tmp_path):
    pytest.importorskip("ray")
    command = [str(Path(sys.executable).with_name("ray"))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    env["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")  # where it leaves word that it is there, for all who ask
    options = f"--head --port {port} --num-cpus 2 --include-dashboard false --object-store-memory 100000000 --block"
    head = subprocess.Popen([*command, "start", *options.split()], env=env, stdout=subprocess.DEVNULL)
    words = ["--policies", "fifo", "--seeds", "2", "--images", "64"]
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(5)
        asked = ["compare", "--source", source, *TINY, *words, "--on", f"ray:127.0.0.1:{port}"]
        script = [sys.executable, "-m", "streamclr", *asked, "--out", str(tmp_path / "there")]
        done = subprocess.run(script, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)
        shutil.rmtree(env["RAY_TMPDIR"], ignore_errors=True)
    compared(tmp_path / "here", source, *words)
    assert (tmp_path / "there" / "table.md").read_text() == (tmp_path / "here" / "table.md").read_text()


@pytest.mark.system
@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:1", "Connection refused"), ("nowhere", "invalid literal"), ("ray://127.0.0.1:1", "refused")],
)
def test_an_address_without_a_cluster_is_one_line(address, said, monkeypatch, tmp_path):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=rf"no Ray cluster at '{address}' \(.*{said}.*\): give ray:HOST:PORT"):
        open_place(f"ray:{address}", None, "cpu")


@pytest.mark.parametrize("name", ["serve", "predict"])
def test_what_only_a_run_of_this_machine_can_do(name, capsys):
    assert main(["compare", *TINY, "--on", "ray", f"--{name}"]) == 2
    assert f"no option '--{name}' in streamclr compare" in capsys.readouterr().err


@pytest.mark.system
def test_without_ray_it_says_what_to_install_and_nothing_else_imports_it(source, tmp_path):
    code = f"""
import importlib.util, json, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "ray" else find(name, *rest)
from streamclr.cli.entry import main
words = {TINY!r} + ["--source", {source!r}, "--policies", "fifo", "--seeds", "1", "--images", "64"]
codes = [main(["compare", *words, "--out", {str(tmp_path / "here")!r}])]
codes += [main([*command, "--on", "ray", "--out", {str(tmp_path / "there")!r}])
          for command in (["compare", *words], ["reproduce", "labels"])]
print(json.dumps([codes, [name for name in sys.modules if name.split(".")[0] in ("ray", "flwr")]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 2, 2], []]
    assert done.stderr.count("--on ray needs ray: pip install -c constraints.txt -e '.[fleet]'") == 2
    assert not (tmp_path / "there").exists()
