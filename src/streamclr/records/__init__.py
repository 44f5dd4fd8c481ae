"""What a run keeps on the disk: options, plan, run directory, checkpoints, journal. Imports streams and the method."""
