"""The rounds as a Flower strategy: FedAvg sends the messages, `average.py` combines the answers."""

import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
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


class Fleet(FedAvg):
    """FedAvg that goes on without devices that fail, send a bad update or do not answer."""

    def __init__(self, rounds: Rounds, config: RoundsOptions, shared: dict[str, Any]):
        super().__init__(
            fraction_train=config.fraction,
            fraction_evaluate=config.fraction,
            min_train_nodes=config.min_devices,
            min_evaluate_nodes=config.min_devices,
            min_available_nodes=config.min_devices,
        )
        self.rounds, self.config = rounds, config
        self.shared = {name: "" if shared[name] is None else shared[name] for name in SHARED}
        self._have_head: set[int] = set()  # devices that have the current classifier
        self._asked, self._since = 0, 0.0

    def run(self, grid: Grid) -> None:
        """Run the remaining rounds."""
        left = self.config.rounds - self.rounds.n_rounds
        if left > 0:
            arrays = as_record(self.rounds.average.weights)
            patient = Patient(grid, self.config.patience)
            self.start(patient, arrays, left, timeout=self.config.deadline)
            self._hand_out(patient)

    def _hand_out(self, grid: "Patient") -> None:
        """After the last round, send the classifier to the devices that lack it."""
        nodes = [node for node in grid.get_node_ids() if node not in self._have_head]
        if self.rounds.head is None or not nodes:
            return
        config = ConfigRecord({"statistics": self.config.statistics, **self.shared})
        messages = [Message(RecordDict({"config": config}), dst_node_id=node, message_type="query") for node in nodes]
        self._add_head(messages)
        for reply in grid.send_and_receive(messages, timeout=self.config.deadline):
            if reply.has_error():
                _report(reply, "did not accept the classifier")

    def _add_head(self, messages: list[Message]) -> None:
        """Add the classifier for devices that lack it. Flower shares one content among all messages, hence the copy."""
        head, extra = self.rounds.head, RecordDict()
        if head is not None:
            extra["head"], extra["encoder"] = as_record(head.weights), as_record(head.encoder)
            extra["classes"] = ConfigRecord({"names": list(head.classes)})
        for message in messages:
            message.metadata.ttl = self.config.deadline
            if message.metadata.dst_node_id not in self._have_head:
                message.content = RecordDict({**message.content, **extra})

    def summary(self) -> None:
        """Print nothing: the options are in fleet.json."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        number = self.rounds.n_rounds + 1
        about = {"round": number, "images": self.config.round_images, "statistics": self.config.statistics}
        config = ConfigRecord({**about, **self.shared})
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._add_head(messages)
        self._asked, self._since = len(messages), time.monotonic()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
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
        self.rounds.take(updates, self._asked, failed, time.monotonic() - self._since)
        return as_record(self.rounds.average.weights), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Second half of a round: ask for the features of labelled images, computed with the new encoder."""
        number = self.rounds.n_rounds
        if number % self.config.head_every and number < self.config.rounds:
            return []
        config = ConfigRecord({"round": number, "statistics": self.config.statistics, **self.shared})
        kept = as_record(self.rounds.average.kept)
        messages = list(super().configure_evaluate(server_round, kept, config, grid))
        for message in messages:
            message.metadata.ttl = self.config.deadline
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        labelled = []
        for reply in replies:
            if reply.has_error():
                _report(reply, "sent no labels")
                continue
            if "features" not in reply.content:
                continue
            device = str(reply.metadata.src_node_id)
            try:
                features = as_weights(reply.content["features"])["features"]
                labelled.append((device, features, [str(name) for name in reply.content["classes"]["names"]]))
            except (UserError, KeyError, TypeError):
                self.rounds.refused["labels"] += 1
        if labelled and self.rounds.take_labels(labelled) is not None:
            self._have_head.clear()
        return None


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


class Patient:
    """A grid that does not wait for the slowest: once half have answered, the rest get `patience` times as long.

    Later answers are ignored.
    """

    def __init__(self, grid: Grid, patience: float):
        self.grid, self.patience = grid, patience

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        started = time.monotonic()
        waiting = set(self.grid.push_messages(messages)) - {None}
        replies: list[Message] = []
        n_asked, allowed = len(waiting), timeout
        while waiting and time.monotonic() - started < allowed:
            new = list(self.grid.pull_messages(waiting))
            replies += new
            waiting -= {reply.metadata.reply_to_message_id for reply in new}
            sound = sum(not reply.has_error() for reply in replies)
            if allowed == timeout and 2 * sound >= n_asked > 0:
                took = time.monotonic() - started
                allowed = min(timeout, max(self.patience * took, took + MIN_WAIT_SECONDS))
            if waiting:
                time.sleep(POLL_EVERY)
        return replies
