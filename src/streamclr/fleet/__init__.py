"""A fleet: many devices, each with a learner, a camera and a buffer of its own, and one encoder. Images stay where they
were taken; weights go to a server and back (Flower).

`average.py`, `device.py` and `split.py` know nothing of Flower; `strategy.py` and `apps.py` make a Flower app of them.
"""
