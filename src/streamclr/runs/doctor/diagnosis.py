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
    """A step of a run, as this machine made it just now."""

    scoring: float  # seconds, median
    training: float
    n_frames: int  # of one step
    checkpoint: int  # bytes
    n_measured: int = 1  # images of the measurement, the times scaled from them to those of a step
    n_images: int = 1

    @property
    def seconds(self) -> float:
        return self.scoring + self.training

    def ratio(self, fps: float) -> float:
        """Seconds of a step for each second in which its frames arrive; up to 1 it keeps up."""
        return self.seconds * fps / self.n_frames


@dataclass(frozen=True)
class Suggestion:
    change: str
    seconds: float  # of a step
    ratio: float

    def __str__(self) -> str:
        does = "keeps up" if self.ratio <= 1 else "better, but still too slow"
        return f"{self.change}: a step takes {_seconds(self.seconds)}, {does}"


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    source: str
    size: int
    fps: float
    step: Measured
    peak: int | None  # bytes of memory, predicted; None: not known
    checkpoint_hours: float | None  # between two checkpoints; None: only the last

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
        """A name and what is said about it; the verdict last."""
        step = self.step
        some = f", measured on {step.n_measured} of {step.n_images} images" if step.n_measured < step.n_images else ""
        arrive = f"{step.n_frames} frames arrive every {_seconds(step.n_frames / self.fps)}"
        verdict = f"{arrive}, a step takes {_seconds(step.seconds)}"
        rows = [
            *self.machine.rows(),
            ("source", f"{self.source}, {self.size}x{self.size} px, {self.fps:g} frames a second"),
            ("step", f"scoring {_seconds(step.scoring)}, training {_seconds(step.training)}{some}"),
            ("peak", "not known for this model" if self.peak is None else f"about {self.peak / MIB:.0f} MiB of memory"),
            ("checkpoint", self._checkpoint()),
            ("verdict", f"{'keeps up' if self.keeps_up else 'too slow'}: {verdict}"),
        ]
        if not self.keeps_up:
            lost = self.fps * (1 - 1 / self.ratio)
            rows.append(("skipped", f"{lost:,.1f} of {self.fps:g} frames a second, {lost * 86400:,.0f} a day"))
        return rows

    def _checkpoint(self) -> str:
        size = f"{self.step.checkpoint / MIB:.1f} MiB"
        how = "only at the end"
        if self.checkpoint_hours:
            minutes, hourly = 60 * self.checkpoint_hours, self.bytes_an_hour / GIB
            how = f"one every {minutes:.3g} minutes, {hourly:.2g} GiB an hour"
        if self.bytes_an_hour > 1.001 * MAX_BYTES_PER_HOUR:
            how += " (more than 1 wears out a memory card: use a larger --checkpoint-steps)"
        if not self.fits_on_disk:
            how += f"; they need {self._disk_needed / MIB:,.0f} MiB, and the disk has less: free some space"
        return f"{size}, {how}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
