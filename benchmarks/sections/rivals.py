"""Our step against what a user would write instead, or take from lightly."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

from streamclr.compute.memory import MIB

from .measure import BENCHMARKS, Cost, Ratio
from .report import row

# By encoder: steps in a turn, and how many times as fast our step is to be, in wall time and in CPU time.
ENCODERS = {"compact": (40, 2.0), "mobilenet_v2": (6, 1.3)}
NAMES = {"compact": "compact, 32 px", "mobilenet_v2": "MobileNetV2, 64 px"}
OURS = {"ours_alike": "all layers learn in both, views of one size", "ours": "ours as by default"}

PEERS = {"plain": "a plain PyTorch loop", "lightly": "lightly"}


class Contestant:
    """A side in a process of its own, see contestant.py."""

    def __init__(self, side: str, encoder: str, n_steps: int):
        words = [sys.executable, "-m", "sections.contestant", side, encoder, str(n_steps)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, cwd=BENCHMARKS, env=os.environ, **pipes)
        self.memory = self.memory_of_workers = 0.0  # MiB, once it has ended

    def turn(self) -> Cost:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return Cost(*self._told())

    def close(self) -> None:
        self.process.stdin.close()
        self.memory, self.memory_of_workers = (n / MIB for n in self._told())
        self.process.wait()

    def _told(self) -> list[float]:
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{' '.join(self.process.args)} has ended")
        return json.loads(line)


def rivals(encoders: dict[str, tuple[int, float]] = ENCODERS, turns: int = 4) -> None:
    """A whole step of ours, how many times as fast as one of a plain PyTorch loop: same encoder, batch, two views.

    Each side has a process of its own, and they take turns. The loop is in plain_simclr.py; lightly's own transform and
    loss take part where lightly is installed (`make bench-peers`).
    """
    peers = ["plain", *(["lightly"] if find_spec("lightly") else [])]
    for encoder, (n_steps, least) in encoders.items():
        sides = {side: Contestant(side, encoder, n_steps) for side in (*OURS, *peers)}
        costs = {side: [] for side in sides}
        for turn in range(turns + 1):
            for side, contestant in sides.items():
                cost = contestant.turn()
                if turn:  # the first one warms up
                    costs[side].append(cost)
        for contestant in sides.values():
            contestant.close()
        for peer in peers:
            for side, what in OURS.items():
                ratio = Ratio.of(costs[peer], costs[side])
                figure = f"{NAMES[encoder]}: our step as fast as that of {PEERS[peer]}, {what}"
                row(figure, f"{ratio} times", f"at least {least:g} times", ratio.at_least(least))
        for side, contestant in sides.items():
            workers = f" and {contestant.memory_of_workers:.0f} MiB of its workers" if side in peers else ""
            row(f"{NAMES[encoder]}: peak memory, {side}", f"{contestant.memory:.0f} MiB{workers}")
