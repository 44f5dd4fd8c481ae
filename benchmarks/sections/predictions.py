"""What an answer costs, and whether what is shipped gives the same."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from streamclr import ContrastScoring, Learner, open_stream, resnet18
from streamclr.classifier import Classifier, train_head
from streamclr.encoders.inference import seeded
from streamclr.models.formats.executorch import make_executorch, open_executorch
from streamclr.models.formats.onnx_file import looked_again, make_onnx, open_onnx
from streamclr.models.formats.quantise import Calibration
from streamclr.models.parity import BATCHES, compare, one_thread, race
from streamclr.models.versions import Score, Version
from streamclr.runs.evaluation import extract

from .measure import Case, Ratio, Spread, in_turns, seconds
from .report import row
from .subjects import COMPACT, MOBILENET_64, Subject, cifar, frames, images, untrained

N_IMAGES = 64  # classified in a turn


def prediction(subjects: tuple[Subject, ...] = (MOBILENET_64, COMPACT), turns: int = 7) -> None:
    """An answer for an image by the exported files, how many times as fast as PyTorch in eval mode; one thread.

    The encoders that a run has by default; `shipped` has ResNets, and whether the answers are the same.
    """
    with one_thread():
        for subject in subjects:
            classifier = learned_a_little(subject)
            buffer = frames(4 * N_IMAGES, subject.size)
            about = {"format_version": 1, "classes": classifier.classes, "size": subject.size}
            answers = {"PyTorch": classifier.probabilities}
            for name, calibration in (("ONNX", None), ("int8 ONNX", Calibration.of(buffer, pure=False))):
                answers[name] = open_onnx(make_onnx(classifier, about, calibration))
            for n in BATCHES:
                parts = frames(N_IMAGES, subject.size, start=10**6).split(n)
                costs = in_turns({name: answering(answer, parts) for name, answer in answers.items()}, turns)
                usual = costs.pop("PyTorch")
                figure = f"{subject.name}, {n} at a time"
                milliseconds = Spread.of([1000 * cost.cpu / N_IMAGES for cost in usual])
                row(f"{figure}: PyTorch, CPU time of an image", f"{milliseconds} ms")
                for name, found in costs.items():
                    row(f"{figure}: {name} as fast as PyTorch", f"{Ratio.of(usual, found)} times")


def learned_a_little(subject: Subject) -> Classifier:
    """With statistics of BatchNorm that fit its weights, as a classifier in use has them."""
    learner = subject.make()
    for segment in frames(8 * learner.batch_size, subject.size).split(learner.batch_size):
        learner.learn_many(segment)
    return untrained(learner, subject.size)


def answering(answer: Callable[[Tensor], object], parts: Sequence[Tensor]) -> Case:
    def turn() -> None:
        for part in parts:
            answer(part)

    return turn


def predicting(width: int = 16, segment: int = 128) -> None:
    """What `run --predict` adds to a step: every image of a segment classified, on one thread."""

    def costs(size: int) -> tuple[float, float]:
        """Of a step: the images of a segment some at a time, and one by one."""
        encoder, policy = resnet18(width, "small" if size < 64 else "imagenet"), ContrastScoring(rescore_every=50)
        learner = Learner(encoder, policy, buffer=segment, device="cpu")
        new, nobody = images(segment, size), frozenset[str]()
        version = Version(untrained(learner, size), 0, nobody, nobody, Score(0, 0, 0.0))
        step = seconds(lambda: learner.learn_many(new))
        some, one = (seconds(lambda n=n: [version.probabilities(part) for part in new.split(n)]) for n in (64, 1))
        return some / step, one / step

    with one_thread():
        for size in (32, 96):
            what = f"classifying {segment} images of {size} px, of a step of width {width}"
            row(f"{what}: some at a time, one by one", "{:.2f}, {:.2f}".format(*costs(size)))


def shipped() -> None:
    """The exported files against PyTorch, one thread: CIFAR-10's test images, encoders that learned a little."""
    test = cifar()
    if test is None:
        row("the exported classifier", "skipped: no CIFAR-10", "streamclr data get cifar10")
        return
    unseen = torch.from_numpy(test.images(np.arange(0, len(test), len(test) // 1000)))
    for width, n_steps, batch, n_labels in ((16, 20, 256, 5000), (64, 8, 64, 1000)):
        stream = open_stream("cifar10", stc=50)  # so that 512 images have all classes
        with seeded(0):
            encoder = resnet18(width)
        policy = ContrastScoring(rescore_every=50)
        learner = Learner(encoder, policy, buffer=256, batch_size=batch, lr=1e-3, device="cpu")
        for segment in stream.segments(batch, until=batch * n_steps):
            learner.learn_many(segment)
        train = stream.train
        features, labels, _ = extract(learner.model, train, torch.arange(0, len(train), len(train) // n_labels))
        head = train_head(features, labels, 10, quiet=True)
        module = Classifier(learner.model, head, test.classes, 32)
        buffer = learner.buffer.images
        about = {"format_version": 1, "classes": list(test.classes), "size": 32}
        files = {
            "float": make_onnx(module, about, None),
            "int8": make_onnx(module, about, Calibration.of(buffer, pure=False)),
            "pure int8": make_onnx(module, about, Calibration.of(buffer, pure=True)),
        }
        runs = {name: open_onnx(file) for name, file in files.items()}
        found = {
            name: compare(module, runs[name], unseen, len(files[name]), name != "float") for name in ("float", "int8")
        }
        what = f"width {width}, {len(unseen):,} test images of CIFAR-10"
        exact = found["float"]
        row(
            f"ONNX against PyTorch, {what}: largest difference of a probability, same class",
            f"{exact.largest_difference:.1e}, {100 * exact.equal_classes:.1f} %",
            "at most 1e-4, 100 %",
            exact.largest_difference <= 1e-4 and exact.equal_classes == 1,
        )
        equal = found["int8"].equal_classes
        row(f"int8 ONNX against PyTorch, {what}: same class", f"{100 * equal:.1f} %", "at least 99 %", equal >= 0.99)
        row("    looked at again in float", f"{100 * (looked_again(files['int8'], unseen) or 0):.1f} %")
        classes, pure = (
            torch.cat([runs[name](p)[0].argmax(1) for p in unseen.split(64)]) for name in ("float", "pure int8")
        )
        row("    the same class with --pure", f"{100 * float((classes == pure).double().mean()):.1f} %")
        sizes = ", ".join(f"{len(file) / 1e6:.2f}" for file in files.values())
        row("    size, float, int8 and pure int8", f"{sizes} MB")
        for n in exact.seconds:
            gain = exact.seconds_torch[n] / exact.seconds[n]
            row(f"    ONNX as fast as PyTorch, {n} at a time", f"{gain:.2f} times", "at least 1", gain >= 1)
            gain8 = found["int8"].seconds_torch[n] / found["int8"].seconds[n]
            row(f"    int8 as fast as PyTorch, {n} at a time", f"{gain8:.2f} times", "at least 1.5", gain8 >= 1.5)
            for name in ("int8", "pure int8"):
                slow, fast = race(runs["float"], runs[name], unseen, n)
                row(f"    {name} as fast as float ONNX, {n} at a time", f"{slow / fast:.2f} times")
        if width == 16:
            executorch(module, buffer, unseen[::4])


def executorch(module, buffer: torch.Tensor, unseen: torch.Tensor) -> None:
    if not find_spec("executorch"):
        row("ExecuTorch", "skipped: not installed", "pip install -c constraints.txt -e '.[executorch]'")
        return
    for int8, name in ((False, "ExecuTorch"), (True, "int8 ExecuTorch")):
        content = make_executorch(module, {}, Calibration.of(buffer, pure=True) if int8 else None)
        found = compare(module, open_executorch(content), unseen, len(content), int8)
        row(
            f"{name} against PyTorch, {len(unseen)} of them: largest difference of a probability, same class",
            f"{found.largest_difference:.1e}, {100 * found.equal_classes:.1f} %",
            "" if int8 else "at most 1e-4, 100 %",
            None if int8 else found.problem is None and found.equal_classes == 1,
        )
        row("    size", f"{found.n_bytes / 1e6:.2f} MB")
        row("    as fast as PyTorch, 1 at a time", f"{found.seconds_torch[1] / found.seconds[1]:.2f} times")
