"""Datasets: where their files are, how they are read, and the order in which they become a stream."""
