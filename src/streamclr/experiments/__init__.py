"""The paper's experiments, one short script per table or figure, and some that are not in the paper."""
