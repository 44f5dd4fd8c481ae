"""The Flower apps of a fleet: how a device answers messages, and what the server runs."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from streamclr.base.errors import Stopped, UserError
from streamclr.fleet.device import Device
from streamclr.fleet.options import ServerOptions, learner_options
from streamclr.fleet.rounds import Rounds
from streamclr.fleet.strategy import Fleet, as_record, as_weights

FAILED = 0  # Flower's code for an unknown error
Open = Callable[[Context, ConfigRecord], Device]


def client_app(open_device: Open) -> ClientApp:
    """open_device: opens the device of a node, with the options that the server sent."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _learn(open_device, message, context))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _label(open_device, message, context))

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _take(open_device, message, context))

    return app


def _learn(open_device: Open, message: Message, context: Context) -> RecordDict:
    content, config = message.content, message.content["config"]
    with closing(open_device(context, config)) as device:
        update = device.learn(as_weights(content["arrays"]), int(config["images"]), str(context.node_id))
        _take_head(device, content)
    metrics = MetricRecord({"num-examples": update.n_images, "loss": update.loss})
    return RecordDict({"arrays": as_record(update.weights), "metrics": metrics})


def _take(open_device: Open, message: Message, context: Context) -> RecordDict:
    with closing(open_device(context, message.content["config"])) as device:
        _take_head(device, message.content)
    return RecordDict({})


def _take_head(device: Device, content: RecordDict) -> None:
    if "head" in content:
        names = list(content["classes"]["names"])
        device.take_head(as_weights(content["encoder"]), as_weights(content["head"]), names)


def _label(open_device: Open, message: Message, context: Context) -> RecordDict:
    with closing(open_device(context, message.content["config"])) as device:
        features, names = device.features(as_weights(message.content["arrays"]))
    metrics = MetricRecord({"num-examples": len(names)})
    if not names:
        return RecordDict({"metrics": metrics})
    classes = ConfigRecord({"names": names})
    return RecordDict({"features": as_record({"features": features}), "classes": classes, "metrics": metrics})


def _answered(message: Message, work: Callable[[], RecordDict]) -> Message:
    """Reply with the result, or with an error of one line; the device goes on."""
    try:
        return Message(work(), reply_to=message)
    except (UserError, OSError, Stopped) as error:
        return Message(Error(FAILED, " ".join(str(error).split())), reply_to=message)


# ----------------------------------------------------------------------------------------------------------------------
# Deployed: Flower starts each app in its own process, which gets the configuration from Flower only.


def _deployed(context: Context, config: ConfigRecord) -> Device:
    own = json.loads(str(context.node_config["device"]))
    return Device(learner_options(dict(config), own), statistics=str(config["statistics"]))


device = client_app(_deployed)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = ServerOptions(**json.loads(str(context.run_config["fleet"])))
    rounds = Rounds(Path(config.out), config.learner, config.of_the_rounds)
    with closing(rounds):
        Fleet(rounds, config, vars(config.learner)).run(grid)
