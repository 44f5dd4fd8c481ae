"""What happens as things grow: which costs stay, which rise in proportion, and which rise faster."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from streamclr import ContrastScoring, Guarded, fit_linear, open_stream
from streamclr.buffer import Buffer
from streamclr.classifier import Classifier, Head
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.memory import MIB, peak, resident
from streamclr.labelling.candidates import png
from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Labels, Question
from streamclr.policy import POLICIES, Policy, Reservoir
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.run import run

from . import subjects
from .capture import N_PASSES, less
from .measure import Case, Ratio, below, calling, child, forget_peak, in_turns, private_bytes
from .report import row
from .subjects import COMPACT, MOBILENET_64, Steps, Subject, frames, images, make_clip

# Without a score, which is the usual policy, and with all that looks at the whole buffer.
CHOOSERS: dict[str, Callable[[], Policy]] = {
    "a reservoir": Reservoir,
    "scores (T = 50) and guards": lambda: Guarded(ContrastScoring(50)),
}


def growth() -> None:
    """A step of MobileNetV2 at 64 px as by default, over the one with the least: of the buffer, of the segment, of the
    image. A policy by itself, and reading, over those with the fewest images and recordings."""
    keep_freed_memory()
    buffers()
    segments()
    sizes()
    pools()
    cameras()


def growth_of_labels() -> None:
    """A classifier and its labelling page, over those with the fewest classes and labels."""
    classes()
    labels()


def grown(
    what: str,
    cases: Mapping[object, Case],
    turns: int = 3,
    notes: Mapping[object, str] | None = None,
    warm_up: bool = True,
) -> None:
    """A row for each case, over the first one. what: names both, as "a buffer of {}, of one of {}"."""
    costs = in_turns(cases, turns, warm_up)
    first, *rest = (f"{n:,}" if isinstance(n, int) else n for n in cases)
    usual, *others = costs.values()
    for n, name, cost in zip(list(cases)[1:], rest, others, strict=True):
        row(what.format(name, first), f"{Ratio.of(cost, usual)}{f'; {notes[n]}' if notes else ''}")


def buffers(
    subject: Subject = MOBILENET_64, buffers: Sequence[str] = ("16M", "64M", "256M", "1G"), turns: int = 3
) -> None:
    for name, choose in CHOOSERS.items():
        steps, notes = {}, {}
        for buffer in buffers:
            before = resident()
            learner = subject.make(policy=choose(), buffer=buffer)
            steps[buffer] = Steps(learner, subject.size, turns + 2)
            forget_peak()
            steps[buffer]()
            notes[buffer] = f"{learner.buffer.size:,} images, {(peak() - before) / MIB:.0f} MiB more"
        grown(f"step with {name} and a buffer of {{}}, of that with {{}}", steps, turns, notes)


def segments(subject: Subject = MOBILENET_64, lengths: Sequence[int] = (16, 64, 256, 1024), turns: int = 3) -> None:
    for name, choose in CHOOSERS.items():
        steps = {n: Steps(subject.make(policy=choose()), subject.size, turns + 1, n) for n in lengths}
        grown(f"step with {name} and a segment of {{}}, of that with {{}}", steps, turns)


STEP = """
import json
from sections import subjects
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.memory import MIB, peak
keep_freed_memory()
subjects.Steps(getattr(subjects, $make)(batch_size=16), $side, 1)()
print(json.dumps([peak() / MIB]))
"""


def sizes(make: str = "adapted", sides: Sequence[int] = (32, 64, 96, 128, 160, 224), turns: int = 3) -> None:
    """With a batch of 16: one of 64 images of 224 px takes six gigabytes. make: a function of subjects.py."""
    steps = {side: Steps(getattr(subjects, make)(batch_size=16), side, turns + 1) for side in sides}
    notes = {side: f"a process takes {child(STEP, make=make, side=side)[0]:.0f} MiB" for side in sides}
    grown("step with images of {} px, of that with {} px (batch 16)", steps, turns, notes)


def pools(n: int = 512, times: int = 8, turns: int = 3) -> None:
    """A policy by itself, on the images of a pool that it chooses half of."""
    model, new = COMPACT.make().model, images(times * n, 16)

    def choosing(policy: Policy, size: int) -> None:
        policy.keep(Buffer(8).pool(new[:size]), size // 2, model)

    for name, policy in POLICIES.items():
        cases = {size: calling(choosing, policy(), size) for size in (n, times * n)}
        grown(f"{name}: half of {{}} images chosen, of half of {{}}", cases, turns)


def cameras(numbers: Sequence[int] = (1, 2, 4, 8), turns: int = 2) -> None:
    """Reading alone; what starting the processes takes is left out, as in `capture`."""
    with tempfile.TemporaryDirectory() as place:
        clip = make_clip(Path(place) / "clip.mp4", n_frames=120, width=320, height=240)
        memory: dict[int, float] = {}

        def reading(n: int, passes: int) -> None:
            names = Path(place) / f"{n}-{passes}.txt"
            names.write_text(f"{clip}?passes={passes}\n" * n)
            for number, _ in enumerate(open_stream(names, size=64).segments(64)):
                if not number:
                    memory[n] = sum(map(private_bytes, below())) / MIB

        cases = {(n, passes): calling(reading, n, passes) for n in numbers for passes in (1, N_PASSES)}
        costs = in_turns(cases, turns)
    spent = {n: list(map(less, costs[n, N_PASSES], costs[n, 1])) for n in numbers}
    for n in numbers[1:]:
        ratio = Ratio.of(spent[n], spent[numbers[0]])
        row(f"reading {n} recordings, of reading {numbers[0]}", f"{ratio}; their processes take {memory[n]:.0f} MiB")


def classes(numbers: Sequence[int] = (10, 100, 1000), n_labels: int = 4000, turns: int = 2) -> None:
    learner = COMPACT.make()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n_labels, learner.model.n_features, generator=generator)
    segment = frames(64, COMPACT.size)

    def training(n: int) -> None:
        fit_linear(features, torch.arange(n_labels) % n, n)

    def classifier(n: int) -> Classifier:
        return Classifier(learner.model, Head(learner.model.n_features, n), [str(i) for i in range(n)], COMPACT.size)

    training(numbers[0])  # warms up: the largest takes long
    cases = {n: calling(training, n) for n in numbers}
    grown(f"a linear classifier of {n_labels:,} labels and {{}} classes, of one of {{}}", cases, turns, warm_up=False)
    cases = {n: calling(classifier(n).probabilities, segment) for n in numbers}
    grown("64 images into one of {} classes, of {}", cases, turns)


def labels(numbers: Sequence[int] = (1000, 10_000, 100_000), turns: int = 1) -> None:
    """The labelling page of a run: what a person waits for as the labels become more."""
    with tempfile.TemporaryDirectory() as place:
        sessions = {n: labelled(Path(place) / str(n), n) for n in numbers}
        parts: dict[str, Callable[[LabelSession], object]] = {
            "the page is opened, and the classifier trained": opened,
            "the classifier is trained again": LabelSession.train,
            "the page asks for its state": LabelSession.state,
        }
        for name, part in parts.items():
            grown(
                f"{{}} labels: {name}, of {{}}", {n: calling(part, session) for n, session in sessions.items()}, turns
            )
        for session in sessions.values():
            session.close()


def opened(session: LabelSession) -> None:
    session.prepare(choose_anew=False)
    session.train()


def labelled(place: Path, n: int, n_classes: int = 10) -> LabelSession:
    """The session of a run with so many labelled questions, each with a neighbouring frame."""
    options = RunOptions(
        "synthetic:?size=16", encoder="compact", width=8, size=16, images=128, label_budget="100", out=str(place)
    )
    run(options, stage_two=False)
    pictures = [png(image) for image in frames(256, 16)]
    with closing(Labels(place / "labels.sqlite")) as store:
        keys = [f"{number:032x}" for number in range(n)]
        asked = [(Question(key, number, number), pictures[number % 256]) for number, key in enumerate(keys)]
        neighbours = {key: [(number + 1, pictures[(number + 1) % 256])] for number, key in enumerate(keys)}
        store.ask(asked, companions=neighbours)
        store.bring_in([(key, "label", f"class {number % n_classes}") for number, key in enumerate(keys)])
    return LabelSession(RunDirectory(place))
