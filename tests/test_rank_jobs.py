"""Several processes, one encoder. Their jobs are in support/rank_jobs.py; whole runs in test_ranks.py."""

import subprocess
from pathlib import Path

import pytest
import torch

from streamclr.base.errors import UserError
from streamclr.compute.ranks import OneProcess, join
from support import rank_jobs
from support.processes import torchrun

JOBS = Path(rank_jobs.__file__)


def found_by(n, path, *names):
    """What each rank of a job found."""
    words, environment = torchrun(n, str(JOBS), str(path), *names)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(path / f"{rank}.pt") for rank in range(n)]


@pytest.fixture(scope="module", params=[2, 3])
def found(request, tmp_path_factory):
    """By one job, because each takes seconds to start."""
    names = ("group", "batch", "part", "orthogonal", "bf16", "losses", "at_once", "own", "agreed")
    return found_by(request.param, tmp_path_factory.mktemp("ranks"), *names)


def cosine(a, b):
    a, b = (torch.cat([t.flatten() for t in gradients.values()]).double() for gradients in (a, b))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def check_equal(rank, alone):
    assert cosine(rank["gradients"], alone["gradients"]) > 0.9999
    assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    for kind in ("statistics", "state"):
        for key, value in alone[kind].items():
            assert torch.allclose(rank[kind][key].double(), value.double(), rtol=0, atol=1e-4), key


@pytest.mark.parametrize("job", ["group", "batch", "part", "orthogonal"])
def test_ranks_learn_as_one_process_with_the_whole_batch(found, job):
    """Twenty steps in double precision: what rounding leaves of a gradient that is 0, Adam makes as large as any."""
    alone = rank_jobs.JOBS[job](OneProcess())
    for rank in found:
        check_equal(rank[job], alone)


def test_ranks_learn_as_one_process_with_every_loss(found):
    alone = rank_jobs.losses(OneProcess())
    for rank in found:
        for name, own in alone.items():
            check_equal(rank["losses"][name], own)
            for key, value in own["loss"].items():
                assert torch.allclose(rank["losses"][name]["loss"][key].double(), value.double(), atol=1e-4), (
                    name,
                    key,
                )
                assert torch.equal(rank["losses"][name]["loss"][key], found[0]["losses"][name]["loss"][key]), (
                    name,
                    key,
                )


def test_ranks_learn_as_one_process_with_views_that_are_made_at_once(found):
    alone = rank_jobs.at_once(OneProcess())
    for rank in found:
        assert rank["at_once"]["losses"] == pytest.approx(alone["losses"], abs=1e-4)


def test_ranks_in_bfloat16_learn_as_one_process_does(found):
    """But for the rounding, which is repeated in each layer; the statistics of BatchNorm are as fine."""
    alone, first = rank_jobs.bf16(OneProcess()), "encoder.bn1.running_var"
    for rank in found:
        assert cosine(rank["bf16"]["gradients"], alone["gradients"]) > 0.9
        assert torch.allclose(rank["bf16"]["statistics"][first], alone["statistics"][first], rtol=1e-4)
        assert rank["bf16"]["losses"] == pytest.approx(alone["losses"], rel=0.02)
        for key, value in alone["statistics"].items():
            assert torch.allclose(rank["bf16"]["statistics"][key].double(), value.double(), rtol=0.01, atol=2e-3), key


@pytest.mark.long
def test_two_ranks_of_128_images_learn_as_one_of_256(tmp_path):
    jobs = ("group_256", "group_256_double")
    single, double = (rank_jobs.JOBS[job](OneProcess()) for job in jobs)
    for rank in found_by(2, tmp_path, *jobs):
        check_equal(rank["group_256_double"], double)
        assert cosine(rank["group_256"]["gradients"], single["gradients"]) > 0.9999
        assert rank["group_256"]["losses"] == pytest.approx(single["losses"], abs=1e-3)
        # As one process with two threads differs from one with one: 3e-4 at most.
        for key, value in single["state"].items():
            assert torch.allclose(rank["group_256"]["state"][key], value, rtol=0, atol=1e-3), key


def test_batch_norm_over_each_ranks_own_is_another_and_leaves_one_encoder(found):
    alone = rank_jobs.batch(OneProcess())
    for rank in found:
        assert cosine(rank["own"]["gradients"], alone["gradients"]) < 0.999
        for key, value in found[0]["own"]["state"].items():
            assert torch.equal(value, rank["own"]["state"][key]), key


def test_all_ranks_have_the_same_weights(found):
    for job in ("group", "batch", "part", "orthogonal", "bf16"):
        for key, value in found[0][job]["state"].items():
            assert all(torch.equal(value, rank[job]["state"][key]) for rank in found), key


def test_what_one_rank_knows_all_know(found):
    n = len(found)
    for index, rank in enumerate(rank["agreed"] for rank in found):
        assert rank["largest"] == [n - 1, 0]
        assert rank["collected"] == [{"rank": i} for i in range(n)]
        is_first, is_last = index == 0, index == n - 1
        assert rank["nobody"] is None
        assert rank["last"] == (("UserError", f"rank {index}") if is_last else ("QuietExit", "2"))
        assert rank["all"] == (("UserError", "rank 0") if is_first else ("QuietExit", "2"))
        told = f"rank {index}" if is_last else f"the step of rank {n - 1} is not finite"
        assert rank["not finite"] == ("NotFinite", told)
        assert "the gradient at step 1 is not finite" in rank["broken gradient"]
        assert rank["unchanged"] == (True, 0)
        assert rank["batches"] == f"the ranks have batches of 3 to {2 + n} images: give all the same"


def test_a_process_that_torchrun_did_not_start_is_alone(monkeypatch):
    assert type(join()) is OneProcess
    monkeypatch.setenv("WORLD_SIZE", "2")  # as some clusters set it for their own ends
    assert type(join()) is OneProcess


@pytest.mark.parametrize("device", ["mps", "cuda:0", "cuda"])
def test_several_ranks_on_a_device_that_cannot_be(monkeypatch, device):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device of several ranks is '{device}'"):
        join(device)
