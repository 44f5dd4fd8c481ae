"""What a person does next with a run: one command, so that no run ends without saying how to go on."""

from streamclr.models.heads import Heads
from streamclr.records.directory import RunDirectory


def next_step(directory: RunDirectory) -> str | None:
    """The command, as a person types it; None if the run asks nobody and has no classifier."""
    heads = Heads(directory)
    labelled = heads.labelled()
    if labelled and not labelled.has_encoder and labelled.encoder != directory.newest_encoder():
        return f"streamclr label train {directory.path} (the encoder has learned on since)"
    if labelled is None and directory.config.label_budget is not None:
        return f"streamclr label {directory.path} (about 2 minutes)"
    return f"streamclr predict {directory.path} --source …" if labelled or heads.by_fraction() else None
