"""Runs of several processes, started by torchrun as a user does."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from streamclr.base.errors import UserError
from streamclr.cli.entry import main
from streamclr.compute.ranks import OneProcess
from streamclr.models.heads import Heads
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.prepare import prepare
from support.camera import write_clip
from support.images import make_folder
from support.processes import torchrun
from support.runs import state_sha256

SMALL = ["--buffer", "8", "--width", "1", "--probes", "0", "--fractions", "1", "--classifier", "linear"]
SYNTHETIC = ["--source", "synthetic:?size=8", "--recipe", "paper", *SMALL]


def job(n, *words):
    """A job on its way: n ranks of `streamclr run`."""
    words, environment = torchrun(n, "-m", "streamclr", "run", *map(str, words))
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(started, timeout=300):
    """Its exit code and what it said, without what torchrun has to say."""
    _, said = started.communicate(timeout=timeout)
    assert not re.search(r"Warning|Traceback[^╰]*streamclr", said.partition("ChildFailedError")[0]), said
    return started.returncode, [line for line in said.splitlines() if re.match("streamclr: |rank |going on", line)]


def done(n, *words):
    started = job(n, *words)
    code, said = ended(started)
    assert code == 0, said
    return said


def parts(path):
    """The directories of all ranks."""
    return [path, *sorted((path / "ranks").iterdir())]


def states(path):
    """Of all ranks, by their last checkpoints."""
    return [(Checkpoints(part / "checkpoints").latest()[0], state_sha256(part)) for part in parts(path)]


def pids_of(started):
    """The ranks' processes, once all learn, in the order of the ranks."""
    found = subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=False)
    ranks = {}
    for pid in map(int, found.stdout.split()):
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair)
        if b"RANK" in variables:
            ranks[int(variables[b"RANK"])] = pid
    return [pid for _, pid in sorted(ranks.items())]


def wait_for(path, n_steps, started, n):
    """Until each of n ranks has so many lines in its journal."""
    journals = [path / "journal.jsonl", *(path / "ranks" / str(i) / "journal.jsonl" for i in range(1, n))]
    until = time.monotonic() + 180
    while not all(j.exists() and len(j.read_bytes().splitlines()) >= n_steps for j in journals):
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


N_STEPS, EACH = 60, 480


def images(n):
    return EACH * n + 5  # of which 5 are no segment for each


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """Runs of 2 and 3 ranks that nobody disturbed; steps enough for a run to be disturbed before it ends."""
    made = {n: tmp_path_factory.mktemp(f"whole{n}") / "run" for n in (2, 3)}
    for n, path in made.items():
        done(n, *SYNTHETIC, "--images", images(n), "--out", path)
    return made


def test_a_run_of_several_ranks_is_one_run(left_alone):
    for n, path in left_alone.items():
        directory = RunDirectory.existing(path)
        results = directory.results
        assert (results["images"], results["steps"]) == (EACH * n, N_STEPS)
        assert results["account"]["received"] == results["account"]["learned"] == EACH * n
        assert [account["learned"] for account in results["accounts_of_ranks"]] == n * [EACH]
        assert Heads(directory).load().classes[0] == "target"
        assert (path / "report.html").exists()
        models = []
        for part in parts(path):
            steps = RunDirectory(part).steps()
            assert [step["number"] for step in steps] == list(range(1, N_STEPS + 1))
            _, state = Checkpoints(part / "checkpoints").latest()
            models.append({name: tensor.tolist() for name, tensor in state["learner"]["model"].items()})
        assert all(model == models[0] for model in models)
        assert len({state for _, state in states(path)}) == n  # each has its own buffer
        losses = [[step["loss"] for step in RunDirectory(part).steps()] for part in parts(path)]
        assert losses[0] == pytest.approx(losses[1])  # of the one batch of all
        scores = [[step["score"] for step in RunDirectory(part).steps()] for part in parts(path)]
        assert scores[0] != pytest.approx(scores[1])


@pytest.mark.parametrize(("n", "killed"), [(2, 0), (3, 2)])
def test_a_rank_that_is_killed_ends_the_job_and_the_next_start_resumes(left_alone, tmp_path, n, killed):
    words = [*SYNTHETIC, "--images", images(n), "--checkpoint-steps", 2, "--out", tmp_path / "run"]
    started = job(n, *words)
    wait_for(tmp_path / "run", 8, started, n)
    at = time.monotonic()
    os.kill(pids_of(started)[killed], signal.SIGKILL)
    code, said = ended(started)
    took = time.monotonic() - at
    assert code != 0
    lost = [line for line in said if "a rank of this job has died" in line]
    assert len(lost) == n - 1, said
    told = [re.search(r"with the same command, it goes on after step (\d+) or a later one$", line)[1] for line in lost]
    assert min(map(int, told)) >= 4
    assert took < 60
    assert RunDirectory(tmp_path / "run").results is None
    after = [found[1] for line in done(n, *words) if (found := re.search(r"going on after step (\d+),", line))]
    assert len(after) == n
    assert len(set(after)) == 1
    assert int(after[0]) >= max(map(int, told))
    assert states(tmp_path / "run") == states(left_alone[n])


@pytest.mark.parametrize("who", ["torchrun", pytest.param("one rank", marks=pytest.mark.long)])
def test_a_job_that_is_asked_to_stop_stops_on_all_ranks_and_resumes(left_alone, tmp_path, who):
    words = [*SYNTHETIC, "--images", images(2), "--checkpoint-steps", 1, "--out", tmp_path / "run"]
    started = job(2, *words)
    wait_for(tmp_path / "run", 3, started, 2)
    os.kill(started.pid if who == "torchrun" else pids_of(started)[1], signal.SIGTERM)
    code, said = ended(started)
    assert code != 0
    assert len([line for line in said if "stopped after step" in line]) == 1, said
    (one, _), (two, _) = states(tmp_path / "run")
    assert one == two >= 3
    done(2, *words)
    assert states(tmp_path / "run") == states(left_alone[2])


@pytest.mark.long
def test_a_damaged_checkpoint_of_one_rank_takes_all_ranks_back(left_alone, tmp_path):
    words = [*SYNTHETIC, "--images", images(2), "--checkpoint-steps", 2, "--out", tmp_path / "run"]
    started = job(2, *words)
    wait_for(tmp_path / "run", 9, started, 2)
    os.kill(pids_of(started)[1], signal.SIGTERM)
    ended(started)
    checkpoints = Checkpoints(tmp_path / "run" / "ranks" / "1" / "checkpoints")
    *_, before, last = checkpoints.numbers()
    (checkpoints.directory / f"{last:010}" / "manifest.json").write_bytes(b"{}")
    code, said = ended(job(3, *words))
    assert code != 0
    assert sum("has 2 ranks, this job 3" in line for line in said) == 1, said
    kept = checkpoints.directory.rename(tmp_path / "kept")
    code, said = ended(job(2, *words))
    assert code != 0
    assert sum("a rank has no checkpoint below" in line for line in said) == 1, said
    kept.rename(checkpoints.directory)
    said = done(2, *words)
    assert sum(f"going on after step {before}," in line for line in said) == 2, said
    assert states(tmp_path / "run") == states(left_alone[2])
    code, said = ended(job(2, *words))
    assert code != 0
    assert [line for line in said if "its run is finished" in line] == said
    assert len(said) == 1


@pytest.mark.system
def test_what_several_ranks_cannot_do_is_one_line_of_one_rank(tmp_path):
    code, said = ended(job(2, *SYNTHETIC, "--images", 160, "--memory", "1G", "--out", tmp_path / "run"))
    assert code != 0
    assert len(said) == 1, said
    assert "--memory is for one process, this job has 2 ranks" in said[0]
    assert not (tmp_path / "run").exists()


class Two(OneProcess):
    """The first of two, as far as it is asked before anything is said to the other."""

    n = 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compile": True}, "--compile is for one process, this job has 2 ranks"),
        ({"label_budget": "5"}, "--label-budget is for one process"),
        ({"images": 9}, "9 images are 0 for each of 2 ranks in segments of 8"),
        ({"source": "clip.mp4"}, "there are 2 ranks and 1 source: each rank needs one"),
        ({"norm_over": "some"}, "norm_over is 'some': use all or own"),
    ],
)
def test_what_several_ranks_cannot_do(tmp_path, monkeypatch, options, told):
    if "source" in options:
        pytest.importorskip("av")
        write_clip(tmp_path / "clip.mp4", n=50)
        monkeypatch.chdir(tmp_path)
    asked = {"source": "synthetic:?size=8", "images": 160, "buffer": 8, "width": 1} | options
    with pytest.raises(UserError, match=told):
        prepare(RunOptions(**asked), Two())


def test_several_ranks_ask_nobody_unless_they_are_told(tmp_path):
    source = f"folder:{make_folder(tmp_path / 'images', 40, 8) / 'ant'}"  # without labels
    assert prepare(RunOptions(source=source, buffer=8, width=1))[0].label_budget == "40"
    assert prepare(RunOptions(source=source, buffer=8, width=1), Two())[0].label_budget is None


def test_torchrun_is_for_run_alone(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["demo"]) == 2
    assert "torchrun is for streamclr run: start streamclr demo without it" in capsys.readouterr().err


@pytest.mark.system
def test_recordings_are_divided_among_the_ranks(tmp_path):
    """All ranks stop together where the shortest ends, and what was not learned from is accounted for."""
    pytest.importorskip("av")
    clips = [write_clip(tmp_path / f"{i}.mp4", n=n) for i, n in enumerate((40, 100, 100))]
    (tmp_path / "list.txt").write_text("\n".join(map(str, clips)))
    words = ["--source", tmp_path / "list.txt", "--size", "16", *SMALL, "--norm-over", "own"]
    done(3, *words, "--out", tmp_path / "whole")
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert results["steps"] == 5
    assert [account["learned"] for account in results["accounts_of_ranks"]] == [40, 40, 40]
    for account in results["accounts_of_ranks"]:
        assert account["received"] == account["learned"] + sum(account["passed"].values())
        # A rank that had read on when another ended has passed that over; one that had not has given it back.
        assert account["passed"] in ({}, {"no segment on another rank": 8})


@pytest.mark.long
def test_fifty_jobs_of_fifty_end_cleanly(tmp_path):
    """gloo would abort now and then at the end of a process that does not leave the group."""
    n, source = 50, f"folder:{make_folder(tmp_path / 'images', n=8)}?stc=4"
    codes = []
    for i in range(n):
        started = job(2, "--source", source, *SMALL, "--images", 32, "--out", tmp_path / f"run{i}")
        _, said = started.communicate(timeout=300)
        codes.append(started.returncode)
        assert not re.search("abort|terminate|Error", said), said
    assert codes == n * [0]
