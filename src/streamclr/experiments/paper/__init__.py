"""The paper's tables and figures, one short script each."""
