"""The account of frames: each frame that was received is learned from, passed over or rejected, with the reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_NAMED = 20  # rejected files that are named; a folder may have a million that are damaged
# Reasons to pass over a frame that was decoded and could be classified first.
AFTER_DECODING = ("undone", "learner busy", "learner stopped")


@dataclass
class Account:
    """How many frames were received, and what became of them; received = learned + passed over + rejected."""

    received: int = 0
    learned: int = 0
    passed: Counter[str] = field(default_factory=Counter)  # good frames that were not used, by reason
    rejected: Counter[str] = field(default_factory=Counter)  # frames that could not be decoded, by reason
    predicted: int = 0  # frames with a line in predictions.jsonl

    @property
    def is_balanced(self) -> bool:
        return self.received == self.learned + self.passed.total() + self.rejected.total()

    @property
    def classifiable(self) -> int:
        """Frames that were decoded: all but those rejected, and those passed over before that."""
        before = sum(n for reason, n in self.passed.items() if reason not in AFTER_DECODING)
        return self.received - self.rejected.total() - before

    def pass_over(self, n: int, reason: str) -> None:
        """Move `n` frames from learned to passed over."""
        self.learned -= n
        self.passed[reason] += n

    def take(self) -> "Account":
        """The account so far; this one begins anew."""
        taken = Account(**vars(self))
        vars(self).update(vars(Account()))
        return taken

    def add(self, other: "Account") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def state_dict(self) -> dict[str, Any]:
        return vars(self) | {"passed": dict(self.passed), "rejected": dict(self.rejected)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Account":
        return cls(**state | {"passed": Counter(state["passed"]), "rejected": Counter(state["rejected"])})

    def __str__(self) -> str:
        parts = [f"{self.received:,} frames = {self.learned:,} learned from"]
        for name, reasons in (("passed over", self.passed), ("rejected", self.rejected)):
            why = f" ({', '.join(f'{n:,} {reason}' for reason, n in reasons.most_common())})" if reasons else ""
            parts.append(f"{reasons.total():,} {name}{why}")
        return " + ".join(parts) + (f"; {self.predicted:,} classified" if self.predicted else "")
