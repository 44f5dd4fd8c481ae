import os
from importlib.metadata import metadata

import pytest
import torch

from streamclr.base import extras
from streamclr.runs.doctor.machine import GIB, Machine


def system(root, **files):
    """A system that is made up of these files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def facts(root):
    return dict(Machine.here(root / "no" / "such" / "run", root).rows())


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def test_a_plain_machine(tmp_path):
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast CPU\nprocessor\t: 1\nmodel name\t: Fast CPU\n",
        "proc/meminfo": "MemTotal:        4194304 kB\nMemAvailable:    2097152 kB\nHugePages_Total:   0\n",
        "proc/self/cgroup": "0::/\n",
        "dev/video10": "",
        "dev/video2": "",
        "sys/class/video4linux/video2/name": "HD Webcam\n",
    }
    rows = facts(system(tmp_path, **files))
    assert rows["processor"] == "Fast CPU, 2 of 4 cores"
    assert rows["memory"] == "4.0 GiB, 2.0 GiB available"
    assert rows["cameras"] == "/dev/video2 (HD Webcam), /dev/video10 (no name)"
    assert rows["datasets"] == "none in the cache"
    assert "torch" in rows["software"]


def test_limits_of_cgroups_of_version_2_count_from_the_own_to_the_top(tmp_path):
    files = {
        "proc/meminfo": "MemTotal:        4194304 kB\n",
        "proc/self/cgroup": "0::/system.slice/door.service\n",
        "sys/fs/cgroup/system.slice/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/system.slice/door.service/memory.max": "max\n",
        "sys/fs/cgroup/system.slice/door.service/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
    }
    machine = Machine.here(tmp_path, system(tmp_path, **files))
    assert machine.memory_limit == GIB
    assert machine.n_cores == 1.5
    assert "this process is limited to 1.00 GiB" in dict(machine.rows())["memory"]


def test_limits_of_cgroups_of_version_1(tmp_path):
    files = {
        "proc/meminfo": "MemTotal:        4194304 kB\n",
        "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/not/seen/in/here\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    machine = Machine.here(tmp_path, system(tmp_path, **files))
    assert (machine.memory_limit, machine.n_cores) == (2 * GIB, 0.5)


def test_no_limit_is_none(tmp_path):
    files = {
        "proc/meminfo": "MemTotal:        4194304 kB\n",
        "proc/self/cgroup": "4:memory:/\n2:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    machine = Machine.here(tmp_path, system(tmp_path, **files))
    assert (machine.memory_limit, machine.n_cores) == (None, 2)


def test_a_system_that_tells_nothing(tmp_path):
    rows = facts(tmp_path)
    assert rows["cameras"] == "none found"
    assert rows["memory"] == "unknown on this system"


def test_a_board_says_what_it_is(tmp_path):
    files = {"proc/device-tree/model": "Raspberry Pi 5 Model B\0", "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 108\n"}
    assert facts(system(tmp_path, **files))["processor"] == "Raspberry Pi 5 Model B, 2 of 4 cores"


def test_this_machine(tmp_path):
    machine = Machine.here(tmp_path)
    assert machine.disk_free > 0
    assert machine.n_cores > 0
    assert machine.extras.keys() == set(metadata("streamclr").get_all("Provides-Extra")) - {"dev"}


def test_each_extra_is_there_or_said_how_to_get(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "streamclr.runs.doctor.machine.extras", lambda: {"video": ["no-such-package"], "x": ["torch>=2"]}
    )
    assert facts(system(tmp_path))["extras"] == (
        f"x (torch {torch.__version__}); no video: pip install -c constraints.txt -e '.[video]'"
    )
    monkeypatch.setattr(extras, "is_clone", lambda: False)  # an installed wheel has no constraints
    assert facts(system(tmp_path))["extras"].endswith("; no video: pip install av")
    assert extras.how_to_install("export") == "pip install onnx onnxscript onnxruntime"
    assert extras.how_to_install("fleet").startswith("pip install 'flwr[simulation]<")
