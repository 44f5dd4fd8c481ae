"""Experiments that are not in the paper, one short script each."""
