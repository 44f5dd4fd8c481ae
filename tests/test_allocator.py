import resource
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from streamclr.compute.allocator import keep_freed_memory, release_freed_memory
(keep_freed_memory if sys.argv[1] == "kept" else release_freed_memory)()
def churn():
    for _ in range(20):
        torch.ones(4_000_000)  # 16 MB, freed at once
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is meant")
def test_memory_that_was_freed_is_used_again():
    faults = {}
    for how in ("released", "kept"):
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["kept"] < 2 * 16_000_000 / resource.getpagesize()  # two tensors' worth at most; anew each time is 20
    assert faults["kept"] < faults["released"]
