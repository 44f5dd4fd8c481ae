import os

import pytest

from streamclr import UserError
from streamclr.base.files import write_json
from streamclr.sweeps.job import RESULT, Job
from streamclr.sweeps.places import Processes, open_place, work


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Makes jobs of `support.sweep_jobs`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)]))
    return lambda function, name: Job(
        name, function, f"support.sweep_jobs:{function}", {"images": 10, "told": str(tmp_path), "name": name}
    )


@pytest.mark.system
def test_each_is_kept_when_it_has_ended_and_one_that_had_is_not_done_again(tmp_path, job):
    (tmp_path / "there").mkdir()
    write_json(tmp_path / "there" / RESULT, {"name": "there"})
    kept = []
    jobs = {tmp_path / name: job("count", f"begun-{name}") for name in ("there", "missing")}
    work(jobs, Processes(2, "cpu"), lambda directory: kept.append(directory.name))
    assert kept == ["there", "missing"]
    assert [path.name for path in tmp_path.glob("begun-*")] == ["begun-missing"]
    assert (tmp_path / "missing" / RESULT).exists()


@pytest.mark.system
def test_one_that_fails_ends_the_others(tmp_path, job):
    place, directories = Processes(2, "cpu"), [tmp_path / "jobs" / name for name in ("a", "b")]
    jobs = dict(zip(directories, (job("fail", "a"), job("sleep", "b")), strict=True))
    with pytest.raises(UserError, match=r"^a-\w+ failed \(a cannot be done\): see .*log.txt$"):
        work(jobs, place, lambda directory: None)
    assert place.n_running == 0
    assert place.has_room()
    assert not (directories[1] / RESULT).exists()


@pytest.mark.system
def test_one_that_was_killed_is_told(tmp_path, job):
    with pytest.raises(UserError, match=r"^a-\w+ failed, killed by signal 9 \(.*\): see .*log.txt$"):
        work({tmp_path / "jobs" / "a": job("die_once", "a")}, Processes(1, "cpu"), lambda directory: None)


@pytest.mark.parametrize("on", ["Ray", "ray:", "rya", "slurm:there", ""])
def test_a_place_that_there_is_not(on):
    with pytest.raises(UserError, match=rf"on is '{on}': use cores, ray .*ray:ADDRESS"):
        open_place(on, None, None)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", "cpu:0"])
@pytest.mark.parametrize("workers", [None, 2])
def test_a_device_that_there_is_not(device, workers, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=device):
        open_place(None, workers, device)
