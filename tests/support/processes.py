"""Jobs of several ranks, and runs that are killed."""

import os
import subprocess
import sys
from pathlib import Path

from streamclr.records.checkpoints import Checkpoints

TESTS = Path(__file__).parents[1]


def torchrun(n, *command):
    """The words that start a job of n processes on this machine, and their environment."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *command]
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return words, os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


KILLED = """
import os, random, signal, sys, threading
from streamclr.cli.entry import main
from streamclr.cli import run  # imported first, so that it is a run that is killed
seed, in_save = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
saves = rng.randrange(10)  # that it makes before, so that a fast machine comes no further than a slow one
calls = rng.randrange(1, 14) if in_save else 1  # of the next save
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
def kill_soon(most):
    timer = threading.Timer(rng.uniform(0.0, most), kill)
    timer.daemon = True
    timer.start()
real = {name: getattr(os, name) for name in ("mkdir", "open", "write", "fsync", "rename")}
def wrapped(name):
    def call(*args, **kwargs):
        global saves, calls
        if "checkpoints" in str(args[0]) or isinstance(args[0], int):
            if saves > 0:
                saves -= name == "rename"
                if saves == 0 and not in_save:
                    kill_soon(0.02)
            elif in_save:
                calls -= 1
                if calls == 0:
                    kill()
        return real[name](*args, **kwargs)
    return call
for name in real:
    setattr(os, name, wrapped(name))
if saves == 0 and not in_save:
    kill_soon(0.3)  # as it starts
sys.exit(main(sys.argv[3:]))
"""


def kill_and_restart(out, words, n_kills, seed):
    """Start a run that saves each step again and again, kill it at random moments, half of them inside a save.

    Returns the kills: n_kills, unless the run ended before.
    """
    kills = last = 0
    for attempt in range(n_kills):
        arguments = [str(seed + attempt), str(attempt % 2), *words]
        ended = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False)
        committed = Checkpoints(out / "checkpoints").latest()
        if ended.returncode == 0:
            break
        assert ended.returncode == -9, ended.stderr
        assert "damaged" not in ended.stderr
        kills += 1
        assert (committed[0] if committed else 0) >= last
        last = committed[0] if committed else 0
    ended = subprocess.run([sys.executable, "-m", "streamclr", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    print(f"{kills} kills, the last of them after step {last} of {Checkpoints(out / 'checkpoints').latest()[0]}")
    return kills
