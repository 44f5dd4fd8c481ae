"""The account of frames: every frame that a source received was learned from, passed over or rejected, and why."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Account:
    received: int = 0
    learned: int = 0
    passed: Counter[str] = field(default_factory=Counter)  # whole frames that were not used, by reason
    rejected: Counter[str] = field(default_factory=Counter)  # what was no frame that can be used, by reason

    @property
    def is_balanced(self) -> bool:
        return self.received == self.learned + self.passed.total() + self.rejected.total()

    def add(self, other: "Account") -> None:
        self.received += other.received
        self.learned += other.learned
        self.passed += other.passed
        self.rejected += other.rejected

    def state_dict(self) -> dict[str, Any]:
        return {
            "received": self.received,
            "learned": self.learned,
            "passed": dict(self.passed),
            "rejected": dict(self.rejected),
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Account":
        return cls(state["received"], state["learned"], Counter(state["passed"]), Counter(state["rejected"]))

    def __str__(self) -> str:
        parts = [f"{self.received:,} frames = {self.learned:,} learned from"]
        for name, reasons in (("passed over", self.passed), ("rejected", self.rejected)):
            why = f" ({', '.join(f'{n:,} {reason}' for reason, n in reasons.most_common())})" if reasons else ""
            parts.append(f"{reasons.total():,} {name}{why}")
        return " + ".join(parts)
