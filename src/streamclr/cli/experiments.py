"""The command `reproduce`."""

from streamclr.experiments import ReproduceOptions, reproduce


def reproduce_command(config: ReproduceOptions) -> None:
    print(f"results: {reproduce(config)}")
