"""A run as a whole: assembling it, the loop, serving while learning, status, metrics, evaluation, report."""
