"""The rounds by Flower: what is sent to the devices, and how long their answers are waited for."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from safetensors import SafetensorError
from safetensors.torch import load, save

from streamclr.base.errors import UserError
from streamclr.base.progress import say
from streamclr.fleet.average import Update, Weights
from streamclr.fleet.options import SHARED, RoundsOptions
from streamclr.fleet.rounds import Rounds

MIN_WAIT_SECONDS = 15.0  # for the slower half; a SuperNode polls every 3 s
POLL_EVERY = 0.2  # seconds
ARRAY = "weights"  # name of the only array in a record


def as_record(weights: Weights) -> ArrayRecord:
    """All weights as one array: Flower makes several signed calls per array, and an encoder has a hundred tensors."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    return ArrayRecord({ARRAY: Array("uint8", (len(content),), "safetensors", content)})


def as_weights(record: ArrayRecord) -> Weights:
    try:
        return dict(load(record[ARRAY].data))
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"cannot read the weights ({type(error).__name__})") from None


class Fleet:
    """Rounds that go on without devices that fail, send a bad update or do not answer."""

    def __init__(self, rounds: Rounds, config: RoundsOptions):
        self.rounds, self.config = rounds, config
        options = {name: getattr(rounds.learner, name) for name in SHARED}
        self.shared = {name: "" if value is None else value for name, value in options.items()}  # Flower has no None
        self._have_head: set[int] = set()  # devices that have the current classifier

    def run(self, grid: Grid) -> None:
        """Run the remaining rounds, then send the classifier to the devices that lack it."""
        if self.rounds.n_rounds >= self.config.rounds:
            return
        while self.rounds.n_rounds < self.config.rounds:
            messages, started = self.train_messages(grid), time.monotonic()
            replies = self._replies(grid, messages)
            self.take_updates(replies, len(messages), time.monotonic() - started)
            number = self.rounds.n_rounds
            if number % self.config.head_every == 0 or number == self.config.rounds:
                # Second half of a round: the features of labelled images, computed with the new encoder.
                arrays = as_record(self.rounds.average.kept)
                messages = self._messages("evaluate", self._sampled(grid), {"arrays": arrays}, round=number)
                self.take_labels(self._replies(grid, messages))
        nodes = [node for node in grid.get_node_ids() if node not in self._have_head]
        if self.rounds.head is not None and nodes:
            for reply in self._replies(grid, self._messages("query", nodes, {})):
                if reply.has_error():
                    _report(reply, "did not accept the classifier")

    def train_messages(self, grid: Grid) -> list[Message]:
        """What begins a round."""
        about = {"round": self.rounds.n_rounds + 1, "images": self.config.round_images}
        return self._messages("train", self._sampled(grid), {"arrays": as_record(self.rounds.sent)}, **about)

    def _sampled(self, grid: Grid) -> list[int]:
        """A share of the devices, as soon as there are enough."""
        n = max(int(len(list(grid.get_node_ids())) * self.config.fraction), self.config.min_devices)
        return sample_nodes(grid, self.config.min_devices, n)[0]

    def _messages(self, kind: str, nodes: Iterable[int], content: dict[str, Any], **about: int) -> list[Message]:
        """One for each node, with the classifier where it is lacking, unless labels for a new one are asked for."""
        content["config"] = ConfigRecord({**about, "statistics": self.config.statistics, **self.shared})
        head, extra = self.rounds.head, {}
        if head is not None and kind != "evaluate":
            extra = {"head": as_record(head.weights), "encoder": as_record(head.encoder)}
            extra["classes"] = ConfigRecord({"names": list(head.classes)})
        contents = {node: RecordDict(content if node in self._have_head else content | extra) for node in nodes}
        return [Message(own, node, kind, ttl=self.config.deadline) for node, own in contents.items()]

    def _replies(self, grid: Grid, messages: Sequence[Message]) -> list[Message]:
        return replies_of(grid, messages, self.config.deadline, self.config.patience)

    def take_updates(self, replies: Iterable[Message], n_asked: int, seconds: float) -> None:
        updates, failed = [], {}
        for reply in replies:
            device = str(reply.metadata.src_node_id)
            if reply.has_error():
                failed[device] = _first_line(reply.error.reason)
                continue
            if self.rounds.head is not None:
                self._have_head.add(reply.metadata.src_node_id)
            try:
                updates.append(_update(device, reply))
            except UserError as error:
                failed[device] = str(error)
        self.rounds.take(updates, n_asked, failed, seconds)

    def take_labels(self, replies: Iterable[Message]) -> None:
        labelled = []
        for reply in replies:
            if reply.has_error():
                _report(reply, "sent no labels")
            elif "features" in reply.content:
                try:
                    features = as_weights(reply.content["features"])["features"]
                    names = [str(name) for name in reply.content["classes"]["names"]]
                    labelled.append((str(reply.metadata.src_node_id), features, names))
                except (UserError, KeyError, TypeError):
                    self.rounds.refused["labels"] += 1
        if labelled and self.rounds.take_labels(labelled) is not None:
            self._have_head.clear()


def replies_of(grid: Grid, messages: Sequence[Message], timeout: float, patience: float) -> list[Message]:
    """The answers, without waiting for the slowest: once half have answered, the rest get `patience` times as long.

    Later answers are ignored.
    """
    started = time.monotonic()
    waiting = set(grid.push_messages(messages)) - {None}
    replies: list[Message] = []
    n_asked, allowed = len(waiting), timeout
    while waiting and time.monotonic() - started < allowed:
        new = list(grid.pull_messages(waiting))
        replies += new
        waiting -= {reply.metadata.reply_to_message_id for reply in new}
        sound = sum(not reply.has_error() for reply in replies)
        if allowed == timeout and 2 * sound >= n_asked > 0:
            took = time.monotonic() - started
            allowed = min(timeout, max(patience * took, took + MIN_WAIT_SECONDS))
        if waiting:
            time.sleep(POLL_EVERY)
    return replies


def _update(device: str, reply: Message) -> Update:
    try:
        arrays, metrics = reply.content["arrays"], reply.content["metrics"]
        n_images, loss = int(metrics["num-examples"]), float(metrics["loss"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError("the answer has no weights and counts") from None
    return Update(device, as_weights(arrays), n_images, loss)


def _report(reply: Message, what: str) -> None:
    say(f"streamclr: device {reply.metadata.src_node_id} {what}: {_first_line(reply.error.reason)}")


def _first_line(text: str) -> str:
    return (text.strip() or "no reason given").splitlines()[0][:300]
