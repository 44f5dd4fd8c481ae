"""The command `reproduce`."""

from streamclr.experiments.reproduce import ReproduceOptions, reproduce


def reproduce_command(config: ReproduceOptions) -> None:
    print(f"results: {reproduce(config)}")
