"""What the doctor found: a step as it was measured, whether it keeps up, and what would."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamclr.compute.memory import MIB
from streamclr.records.checkpoints import MAX_BYTES_PER_HOUR
from streamclr.records.directory import RunDirectory
from streamclr.runs.doctor.machine import GIB, Machine


@dataclass(frozen=True)
class Measured:
    """Steps of a configuration, as this machine made them just now."""

    scoring: float  # seconds, median
    training: float
    n_frames: int  # of one step
    checkpoint: int  # bytes

    @property
    def seconds(self) -> float:
        return self.scoring + self.training

    def ratio(self, fps: float) -> float:
        """Seconds of a step for each second in which its frames come; up to 1 it keeps up."""
        return self.seconds * fps / self.n_frames


@dataclass(frozen=True)
class Suggestion:
    change: str
    seconds: float  # of a step
    ratio: float


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    source: str
    size: int
    fps: float
    step: Measured
    peak: int | None  # bytes of memory; None: this system does not tell
    checkpoint_hours: float | None  # between two checkpoints; None: only the last
    suggestions: list[Suggestion]

    @property
    def ratio(self) -> float:
        return self.step.ratio(self.fps)

    @property
    def keeps_up(self) -> bool:
        return self.ratio <= 1

    @property
    def fits_on_disk(self) -> bool:
        return self.machine.disk_free >= self._disk_needed

    @property
    def _disk_needed(self) -> int:
        return (RunDirectory(Path()).checkpoints.keep + 1) * self.step.checkpoint  # one more while it is written

    @property
    def bytes_an_hour(self) -> float:
        return self.step.checkpoint / self.checkpoint_hours if self.checkpoint_hours else 0.0

    @property
    def is_well(self) -> bool:
        return self.keeps_up and self.fits_on_disk

    def as_dict(self) -> dict[str, Any]:
        names = ("ratio", "keeps_up", "fits_on_disk", "bytes_an_hour", "is_well")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def rows(self) -> list[tuple[str, str]]:
        """A name and what is to be said of it."""
        step = self.step
        parts = f"scoring {_seconds(step.scoring)}, training {_seconds(step.training)}"
        has = f"{_seconds(step.n_frames / self.fps)} in which its frames come at {self.fps:g} a second"
        verdict = f"a step takes {self.ratio:.2f} of the {has}"
        rows = [
            *self.machine.rows(),
            ("source", f"{self.source}, {self.size}x{self.size} px"),
            ("step", f"{step.n_frames} images in {_seconds(step.seconds)}: {parts}"),
            ("peak", "not told by this system" if self.peak is None else f"{self.peak / MIB:.0f} MiB of memory"),
            ("checkpoint", self._checkpoint()),
            ("keeps up", f"{'yes' if self.keeps_up else 'no'}: {verdict}"),
        ]
        if not self.keeps_up:
            lost = self.fps * (1 - 1 / self.ratio)
            daily = f"{lost * 86400:,.0f} a day"
            rows.append(("as it is", f"{lost:,.1f} of {self.fps:g} frames a second are passed over, {daily}"))
        for number, suggestion in enumerate(self.suggestions, 1):
            does = "keeps up" if suggestion.ratio <= 1 else "better, not enough"
            figure = f"{suggestion.ratio:.2f}, a step of {_seconds(suggestion.seconds)}"
            rows.append((f"change {number}", f"{suggestion.change}: {figure}, {does}"))
        return rows

    def _checkpoint(self) -> str:
        size = f"{self.step.checkpoint / MIB:.1f} MiB"
        how = "only at the end"
        if self.checkpoint_hours:
            minutes, hourly = 60 * self.checkpoint_hours, self.bytes_an_hour / GIB
            how = f"one in {minutes:.3g} minutes is {hourly:.2g} GiB an hour of 1 at most"
        if self.bytes_an_hour > 1.001 * MAX_BYTES_PER_HOUR:
            how += ", too much for a memory card: use a larger --checkpoint-steps"
        if not self.fits_on_disk:
            how += f"; {self._disk_needed / MIB:,.0f} MiB are needed and the disk has less: make room"
        return f"{size}, {how}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
