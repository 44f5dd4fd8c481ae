"""Measures whether a run keeps up with its camera on this machine, and what to change if it does not."""
