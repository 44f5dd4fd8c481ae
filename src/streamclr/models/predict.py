"""Predict the classes of the images of any source, with a run or an exported file; an ONNX file needs no torch."""

import csv
import json
import sys
import time
import unicodedata
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from streamclr.answers.answers import Answers, addresses
from streamclr.base import cells as cell
from streamclr.base.errors import UserError
from streamclr.base.files import near
from streamclr.base.options import argument, option
from streamclr.base.progress import Progress, say
from streamclr.models.formats.reader import Predictor, open_exported
from streamclr.records.answering import AnswerOptions
from streamclr.streams.cameras.feed import Feed
from streamclr.streams.cameras.live import CameraFrames
from streamclr.streams.datasets.images import DatasetSource, Source, readable
from streamclr.streams.datasets.registry import DATASETS
from streamclr.streams.frame import SUFFIXES
from streamclr.streams.spec import VIDEOS, fit_of, open_source, split_source, takes

MAX_SENDING_SECONDS = 3600.0  # for the answers that wait when the last image is classified
PIXELS_AT_ONCE = 2**16  # 64 images of 32 px; more is no faster


@dataclass(frozen=True)
class PredictOptions(AnswerOptions):
    """Classify the images of a source with a run or an exported file: JSON lines, a table, a CSV file."""

    model: str = argument("a run directory, or what `export` wrote; an .onnx needs no torch")
    source: str = option("", "where the images come from, as in folder:DIR")
    images: int | None = option(
        None, "how many [all of a source that ends, one pass of a dataset, all that a camera has, else 100]"
    )
    fraction: float | None = option(None, "of a run, the classifier of this label fraction [the largest]")
    served: bool = option(False, "of a run, the version that `run --predict` serves, with its own encoder")
    top: int = option(1, "how many classes to name, the most probable first")
    table: bool = option(False, "print a table instead of JSON lines")
    csv: str | None = option(None, "write this file too, which must be new: a row per image, a column per class")


class Prediction(NamedTuple):
    """For one image: the probability of each class, or why it could not be read."""

    image: int  # its number in the source
    probabilities: np.ndarray | None
    rejected: str = ""
    file: str | None = None  # its path, if it has a file of its own
    source: str = ""  # its camera, recording or dataset
    time: float | None = None  # of a frame of a camera or recording: when it was classified
    pixels: np.ndarray | None = None  # 3 x H x W
    region: str = ""  # of the camera's frames, if it has several

    def top(self, n: int, classes: list[str]) -> list[tuple[str, float]]:
        """The n most probable classes, with their probabilities."""
        if self.probabilities is None:
            return []
        first = np.argsort(-self.probabilities, kind="stable")[:n]
        return [(classes[label], round(float(self.probabilities[label]), 4)) for label in first]


def predict(config: PredictOptions) -> None:
    for name, value in (("images", config.images), ("top", config.top)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: use at least 1")
    addresses(config)
    model = open_predictor(Path(config.model), config.fraction, config.served)
    opened = open_source(config.source, **usual_options(model, config.source))
    if isinstance(opened, list):
        total, predictions = config.images, of_feeds(model, opened, config.images)
        places = [place for feed in opened for place in feed.places.values()]
    else:
        kind, path, _ = split_source(config.source)
        name = f"{kind}:{path}" if path else kind
        places = [(name, "")]
        total = config.images or opened.n_images or opened.epoch or 100
        total = min(total, opened.n_images or total)
        if opened.told:
            say(opened.told)
        predictions = of_source(model, opened, total, name)
    print_line = table_printer(model.classes, config.top) if config.table else json_printer(model.classes, config.top)
    with ExitStack() as stack:
        write = None if config.csv is None else stack.enter_context(csv_writer(Path(config.csv), model.classes))
        answers = stack.enter_context(sending(config, places)) if config.to else None
        stack.enter_context(closing(predictions))
        bar = stack.enter_context(Progress("classified", total, quiet=sys.stdout.isatty()))
        for batch in predictions:
            for prediction in batch:
                print_line(prediction)
            sys.stdout.flush()
            if write is not None:
                write(batch)
            if answers is not None:
                answer(answers, batch, model.classes)
            bar.advance(len(batch))


def usual_options(model: Predictor, source: str) -> dict[str, Any]:
    """What the source is opened with, so that the model sees what it learned from, unless the source says otherwise."""
    kind, _, written = split_source(source)
    # The model scales the images of a dataset itself: opening a dataset with another size needs torch, and is slow.
    usual: dict[str, Any] = {} if kind in DATASETS else {"size": model.size}
    usual |= {"fit": model.fit} if takes(source, "fit") else {}
    if (fit := written.get("fit", model.fit)) != model.fit:
        say(f"streamclr: fit={fit}, and the model learned from frames with fit={model.fit}: it sees others now")
    return {name: value for name, value in usual.items() if name not in written}


def open_predictor(path: Path, fraction: float | None = None, served: bool = False) -> Predictor:
    """The classifier of a run, of a pretrained directory, or of an exported file."""
    if served and fraction is not None:
        raise UserError("both --served and --fraction are given: use one of them")
    if not path.is_file() and not (path / "config.json").is_file():
        hint = "" if path.exists() else f": {near(path) or 'there is nothing of that name'}"
        raise UserError(f"{path} is no run directory, and nothing that 'streamclr export' wrote{hint}")
    if path.is_file() and path.suffix.lower() in {*VIDEOS, *SUFFIXES}:
        raise UserError(f"{path} is a source, no classifier: write streamclr predict RUN --source {path}")
    if path.is_file():
        _refuse_choice(path, fraction, served)
        return open_exported(path)
    import torch

    from streamclr.models.heads import Heads
    from streamclr.models.pretrained import from_pretrained, is_pretrained
    from streamclr.records.directory import RunDirectory

    if is_pretrained(path):
        _refuse_choice(path, fraction, served)
        pretrained = from_pretrained(path)
        return Predictor(
            pretrained.classes, pretrained.size, lambda images: pretrained(images)[0].numpy(), pretrained.fit
        )
    directory = RunDirectory.existing(path)
    classifier = Heads(directory).load(fraction, served)
    return Predictor(
        classifier.classes,
        classifier.size,
        lambda images: classifier.probabilities(torch.from_numpy(images)).numpy(),
        fit_of(directory.config.source),
    )


def classified(model: Predictor, images: np.ndarray) -> np.ndarray:
    probabilities = model.classify(images)
    if not np.isfinite(probabilities).all():
        raise UserError("the model gives probabilities that are no numbers: train and export it again")
    return probabilities


def _refuse_choice(path: Path, fraction: float | None, served: bool) -> None:
    """The options that choose among the heads of a run are not for a file with one."""
    if served or fraction is not None:
        raise UserError(f"--{'served' if served else 'fraction'} is for a run: {path} has one classifier")


def of_source(model: Predictor, source: Source, n_images: int, name: str = "") -> Generator[list[Prediction]]:
    """The predictions for the first images of a source, in batches."""
    place, at_once = 0, 1
    file = source.file if isinstance(source, DatasetSource) else lambda number: None
    while place < n_images:
        numbers = np.arange(place, min(place + at_once, n_images))
        images, good, bad = readable(source, numbers)
        found = {number: Prediction(number, None, error.reason, file(number), name) for number, error in bad.items()}
        if len(good):
            for number, probabilities, pixels in zip(good.tolist(), classified(model, images), images, strict=True):
                found[number] = Prediction(number, probabilities, "", file(number), name, pixels=pixels)
            at_once = max(1, PIXELS_AT_ONCE // images[0, 0].size)
        yield [found[number] for number in numbers.tolist()]
        place += len(numbers)


def of_feeds(model: Predictor, feeds: list[Feed], n_images: int | None) -> Generator[list[Prediction]]:
    """The predictions for the frames of cameras and recordings, one by one: somebody waits for each."""
    cameras, last, whose = CameraFrames(feeds), "none came", ("", "")

    def tell() -> bool:
        nonlocal last
        for told in cameras.take_told():
            say(told)
        for source, event in cameras.take_events():
            last = f"{source}: {event}"
            say(f"streamclr: {last}")
        return False

    def note(_: np.ndarray, name: str, files: list[str]) -> None:
        nonlocal whose
        whose = name, files[-1]

    try:
        with closing(cameras.frames(1, until=n_images, idle=tell, arrived=note)) as frames:
            for images in frames:
                tell()
                name, file = whose
                probabilities, now = classified(model, images)[0], round(time.time(), 3)
                camera, region = cameras.places[name]
                number = cameras.position - 1
                yield [Prediction(number, probabilities, "", file or None, camera, now, images[0], region)]
    finally:  # also when somebody stops it
        tell()
        if rejected := cameras.account.rejected:
            say(f"streamclr: rejected: {', '.join(f'{n:,} {reason}' for reason, n in rejected.most_common())}")
    if not cameras.position:
        raise UserError(f"not one frame could be classified ({'all were rejected' if rejected else last})")


@contextmanager
def sending(config: PredictOptions, places: list[tuple[str, str]]) -> Iterator[Answers]:
    """The destinations of --to; at the end, what waits is sent, unless its destination cannot be reached."""
    with TemporaryDirectory(prefix="streamclr-") as kept:
        tell = lambda event: say(f"streamclr: {event}")  # noqa: E731
        answers = Answers(config, Path(kept), Path(config.model), places, repeats=False, tell=tell)
        answers.start()
        try:
            yield answers
        except BaseException:  # also when somebody stops it
            answers.close()
            raise
        answers.close(patience=MAX_SENDING_SECONDS)


def answer(answers: Answers, predictions: list[Prediction], classes: list[str]) -> None:
    now, lines, rows, frames = round(time.time(), 3), [], [], []
    for one in predictions:
        if one.probabilities is not None and one.pixels is not None:
            line = {"image": one.image, "time": one.time or now, "source": one.source}
            line |= {"region": one.region} if one.region else {}
            lines.append(line | ({"file": one.file} if one.file else {}))
            rows.append(one.probabilities)
            frames.append(one.pixels)
    answers.take(lines, rows, classes, frames)


# ----------------------------------------------------------------------------------------------------------------------
# The forms of output.


def json_printer(classes: list[str], n_top: int) -> Callable[[Prediction], None]:
    def print_line(prediction: Prediction) -> None:
        line: dict[str, Any] = {"image": prediction.image}
        if prediction.time is not None:
            line |= {"source": prediction.source, "time": prediction.time}
        if prediction.region:
            line["region"] = prediction.region
        if prediction.file:
            line["file"] = prediction.file
        if prediction.rejected:
            line["rejected"] = prediction.rejected
        else:
            top = [{"class": name, "probability": value} for name, value in prediction.top(n_top, classes)]
            line |= top[0] | ({"top": top} if n_top > 1 else {})
        print(json.dumps(line))

    return print_line


def table_printer(classes: list[str], n_top: int) -> Callable[[Prediction], None]:
    """A table row by row, as the predictions come; the heading stands above the first."""
    width = min(40, max(5, *map(_width, map(_printable, classes))))
    head: list[str] | None = [f"{'class':<{width}}  {'probability':<11}"] * min(n_top, len(classes))

    def print_line(prediction: Prediction) -> None:
        nonlocal head
        if head is not None:
            print("   image  " + "  ".join(head).rstrip())
            head = None
        cells = [f"{_padded(name, width)}  {value:<11.4f}" for name, value in prediction.top(n_top, classes)]
        said = "  ".join(cells) or f"rejected: {prediction.rejected}"
        print(
            f"{prediction.image:>8}  {said}".rstrip() + (f"  {_printable(prediction.file)}" if prediction.file else "")
        )

    return print_line


def _printable(text: str) -> str:
    """Without control characters, which would act on a terminal: a class name may be any folder's name."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _width(text: str) -> int:  # without rich, which a small device does not have
    """In columns of a terminal: some scripts take two for a character, accents take none."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def _padded(text: str, width: int) -> str:
    text = _printable(text)
    while _width(text) > width:
        text = text[:-2] + "…"
    return text + " " * (width - _width(text))


@contextmanager
def csv_writer(path: Path, classes: list[str]) -> Iterator[Callable[[list[Prediction]], None]]:
    """Writes into a new file, row by row as the predictions come."""
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file:
            sheet = csv.writer(file)
            columns = ["image", "file", "source", "time", "class", "probability", "rejected"]
            sheet.writerow([*columns, *(f"P({name})" for name in classes)])

            def write(predictions: list[Prediction]) -> None:
                for prediction in predictions:
                    which = [prediction.image, *map(cell.written, (prediction.file or "", prediction.source))]
                    which.append("" if prediction.time is None else prediction.time)
                    if prediction.probabilities is None:
                        sheet.writerow([*which, "", "", prediction.rejected, *[""] * len(classes)])
                    else:
                        ((name, value),) = prediction.top(1, classes)
                        each = [round(float(p), 6) for p in prediction.probabilities]
                        sheet.writerow([*which, cell.written(name), value, "", *each])
                file.flush()

            yield write
    except FileExistsError:
        raise UserError(f"{path} exists already: give another --csv, nothing is overwritten") from None
    except OSError as error:
        if error.filename is not None or isinstance(error, BrokenPipeError):  # of another file
            raise
        raise UserError(f"cannot write {path} ({error.strerror}): make room, or give another --csv") from None
