"""How a step is made fast and small: Adam, fast scoring, chunks, memory plan, ranks. Imports encoders and base."""
