"""What `bench.py` measures, one file for each question. A section is a function that adds rows to its table."""

# Of each section its file, in the order in which all of them are measured.
SECTIONS = {
    "start_up": "start",
    "first_run": "start",
    "first_question": "start",
    "live": "runs",
    "two_clips": "two_clips",
    "steps": "steps",
    "stages": "steps",
    "scoring": "steps",
    "overhead": "steps",
    "rivals": "rivals",
    "prediction": "predictions",
    "predicting": "predictions",
    "shipped": "predictions",
    "capture": "capture",
    "growth": "growth",
    "growth_of_labels": "growth",
    "chunks": "memory",
    "memory": "memory",
    "agreement": "scores",
    "duplicates": "scores",
    "dashboard": "runs",
    "ranks": "ranks",
    "long_runs": "scores",
}
