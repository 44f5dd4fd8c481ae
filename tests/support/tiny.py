"""A learner small enough for the benchmarks in tests."""

from sections.subjects import Subject
from streamclr import Learner, compact


def tiny(**options):
    return Learner(compact(4), device="cpu", **{"buffer": 40, "batch_size": 8} | options)


TINY = Subject("tiny", 16, tiny, 1.1, 1.2)
