"""How a step is made fast and small: Adam, fast scoring, chunks, memory plan, allocator, ranks.

May import encoders and base.
"""
