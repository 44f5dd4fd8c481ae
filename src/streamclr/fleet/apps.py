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


def client_app(open_device: Callable[[Context, ConfigRecord], Device]) -> ClientApp:
    """open_device: opens the device of a node, with the options that the server sent."""

    def answering(work: Callable[[Device, RecordDict, str], RecordDict]) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            """Reply with the result, or with an error of one line; the device goes on."""
            try:
                with closing(open_device(context, message.content["config"])) as device:
                    return Message(work(device, message.content, str(context.node_id)), reply_to=message)
            except (UserError, OSError, Stopped) as error:
                return Message(Error(FAILED, " ".join(str(error).split())), reply_to=message)

        return answer

    app = ClientApp()
    app.train()(answering(_learn))
    app.evaluate()(answering(_label))
    app.query()(answering(_take_head))
    return app


def _learn(device: Device, content: RecordDict, name: str) -> RecordDict:
    update = device.learn(as_weights(content["arrays"]), int(content["config"]["images"]), name)
    _take_head(device, content, name)
    metrics = MetricRecord({"num-examples": update.n_images, "loss": update.loss})
    return RecordDict({"arrays": as_record(update.weights), "metrics": metrics})


def _take_head(device: Device, content: RecordDict, name: str) -> RecordDict:
    if "head" in content:
        classes = list(content["classes"]["names"])
        device.take_head(as_weights(content["encoder"]), as_weights(content["head"]), classes)
    return RecordDict({})


def _label(device: Device, content: RecordDict, name: str) -> RecordDict:
    features, names = device.features(as_weights(content["arrays"]))
    metrics = MetricRecord({"num-examples": len(names)})
    if not names:
        return RecordDict({"metrics": metrics})
    classes = ConfigRecord({"names": names})
    return RecordDict({"features": as_record({"features": features}), "classes": classes, "metrics": metrics})


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
    with closing(Rounds(Path(config.out), config.learner, config.of_the_rounds)) as rounds:
        Fleet(rounds, config).run(grid)
