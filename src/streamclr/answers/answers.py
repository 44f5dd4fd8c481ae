"""The answers of a run: which are told, the outbox that keeps them, and their deliveries."""

import base64
import io
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from streamclr.answers.address import Address, parse_address
from streamclr.answers.choice import Chooser
from streamclr.answers.delivery import Delivery, Destination, close_all, counts
from streamclr.answers.file import LinesOfFile
from streamclr.answers.outbox import Outbox
from streamclr.answers.webhook import Webhook
from streamclr.base.errors import UserError
from streamclr.base.files import read_json, write_json
from streamclr.records.answering import AnswerOptions

CLOSE_SECONDS = 5.0  # for the answers that still wait when a run ends
JPEG_QUALITY = 85
MAX_SMOOTH = 1000


def addresses(options: AnswerOptions) -> list[Address]:
    """The destinations; an error for any option that cannot be."""
    names = ("threshold", "smooth", "every_frame", "snapshot")
    if not options.to and (given := [name for name in names if getattr(options, name) not in (None, False)]):
        raise UserError(f"--{given[0].replace('_', '-')} is about answers that are sent: say where with --to")
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise UserError(f"threshold is {options.threshold}: use a probability from 0 to 1, as in 0.7")
    if options.smooth is not None and not 1 <= options.smooth <= MAX_SMOOTH:
        raise UserError(f"smooth is {options.smooth}: use 1 (no smoothing) to {MAX_SMOOTH} frames")
    found = [parse_address(text) for text in options.to]
    for i, address in enumerate(found):
        if address.key in [earlier.key for earlier in found[:i]]:
            raise UserError(f"--to {address.name} is given twice: give it once")
    return found


class Answers:
    """Takes what was predicted for each frame, and sends what is to be told of it; never waits for a destination.

    directory: where they are kept until they are delivered.
    whose: the run or the model that answers; its name is shown, its path tells it from others.
    places: the names of the cameras or the dataset, and for each the name of a region or "".
    repeats: a resumed run gets frames again, of which those that were answered are not answered twice.
    tell: called with a line about what somebody should know, by any thread.
    """

    def __init__(
        self,
        options: AnswerOptions,
        directory: Path,
        whose: Path,
        places: Sequence[tuple[str, str]],
        repeats: bool,
        tell: Callable[[str], None],
        outbox: Outbox | None = None,
    ):
        self.tell = tell
        self.outbox = Outbox(directory) if outbox is None else outbox
        if not (file := directory / "run.json").is_file():
            write_json(file, {"run": secrets.token_hex(6)})
        self.run: str = read_json(file)["run"]
        self._snapshot = options.snapshot
        self._chooser = Chooser(options.threshold or 0.0, options.smooth or 1, options.every_frame)
        self._answered = -1  # number of the last image that was answered and may come again
        missing = set(places)
        for answer in self.outbox.backwards():
            self._chooser.told.setdefault((answer["source"], answer.get("region", "")), answer["class"])
            self._answered = max(self._answered, answer["image"] if repeats else -1)
            missing.discard((answer["source"], answer.get("region", "")))
            if not missing:
                break
        host = f"{socket.gethostname()} {whose.absolute()}"
        device = sha256(host.encode(errors="replace")).hexdigest()[:12]
        self._deliveries: list[Delivery] = []
        for address in addresses(options):
            destination = make_destination(address, self.run, device, whose.name, places)
            if n := [one.destination.name for one in self._deliveries].count(address.name):
                destination.name += f" ({n + 1})"  # two hooks of one host, whose paths are not shown
            self._deliveries.append(Delivery(destination, self.outbox, directory / f"{address.key}.json", tell))
        self.outbox.last = max([self.outbox.last, *(delivery.position for delivery in self._deliveries)])

    def start(self) -> None:
        for delivery in self._deliveries:
            delivery.start()

    def take(
        self,
        lines: Sequence[Mapping[str, Any]],
        probabilities: Iterable[np.ndarray],
        classes: Sequence[str],
        images: Iterable[np.ndarray],
    ) -> None:
        """Lines as in predictions.jsonl; n x classes; and the frames, n x 3 x H x W."""
        told = []
        for line, row, image in zip(lines, probabilities, images, strict=True):
            place = (line["source"], line.get("region", ""))
            name, probability = self._chooser.answer(place, row, classes)
            if line["image"] > self._answered and self._chooser.is_told(place, name):
                answer = {"run": self.run} | dict(line) | {"class": name, "probability": probability}
                told.append(answer | ({"snapshot": jpeg(image)} if self._snapshot else {}))
        if told:
            self.outbox.put(told)
            for delivery in self._deliveries:
                delivery.destination.wake()

    def sync(self) -> None:
        """All answers so far are on the disk when this returns."""
        self.outbox.sync()

    def state(self) -> dict[str, dict[str, Any]]:
        """For each destination how many answers were sent and dropped, how many wait, and whether it is connected."""
        return {delivery.destination.name: delivery.state() for delivery in self._deliveries}

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Send what can be sent in so many seconds; the rest stays on the disk."""
        close_all(self._deliveries, patience)
        for name, state in self.state().items():
            if state["waiting"]:
                self.tell(f"{name}: {state['waiting']:,} answers were not sent")
        self.outbox.close()


def make_destination(
    address: Address, run: str, device: str, title: str, places: Sequence[tuple[str, str]]
) -> Destination:
    if address.scheme == "file":
        return LinesOfFile(address, run)
    if address.scheme in ("http", "https"):
        return Webhook(address, run)
    from streamclr.answers.mqtt import Mqtt  # which needs paho-mqtt

    return Mqtt(address, device, f"StreamCLR {title}", places)


def deliveries_of(directory: Path) -> dict[str, dict[str, int]]:
    """For each destination of answers that are kept there how many answers were sent and dropped, and how many wait."""
    outbox, found = Outbox(directory), {}
    for file in sorted(directory.glob("*-*.json")):
        state = read_json(file)
        found[state["to"]] = counts(outbox, state["position"], state["sent"], state["dropped"])
    return found


def jpeg(image: np.ndarray) -> str:
    """A frame, 3 x H x W, as JPEG in base64."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=JPEG_QUALITY)
    return base64.b64encode(file.getvalue()).decode()
