"""The sentences are made from what a run really says: Challenger, Versions, Loop and Account."""

from collections import Counter

import pytest

from streamclr.models.versions import Score, Version
from streamclr.runs.challenger import NO_LABELS
from streamclr.streams.account import Account
from streamclr.web.plain import plain


def version(number, score=Score(8, 10, 0.3), labels=40):  # noqa: B008
    return Version(None, 900, frozenset(map(str, range(labels))), frozenset(), score, number)


ACCOUNT = Account(9000, 8704, Counter(overload=96), Counter(truncated=200))


@pytest.mark.parametrize(
    ("event", "kind", "text"),
    [
        (
            f"{version(3)} is served; version 2 has {Score(7, 10, 0.4)} of them right",
            "classifier",
            "A better classifier is in use: version 3, from 40 labels. Of those held back 8 of 10 are right, before 7.",
        ),
        (f"{version(1)} is served", "classifier", "A classifier is in use: version 1, from 40 labels."),
        (
            f"{version(1, Score(0, 0, 0.0))} is served",
            "classifier",
            "A classifier is in use: version 1, from 40 labels.",
        ),
        (
            f"a new head of step 900 is refused: {Score(8, 10, 0.3)} labels held back right, "
            f"version 3 has {Score(8, 10, 0.2)}",
            "tried",
            "A new classifier was tried and is not better: it has 8 of 10 held-back labels right, "
            "version 3 has 8 of 10.",
        ),
        (
            "a new head of step 900 is refused: its probabilities are no numbers",
            "tried",
            "A new classifier was tried and is not used: its probabilities are no numbers.",
        ),
        (
            f"rolled back: {version(2)} is served instead of version 3",
            "classifier",
            "Somebody rolled back: version 2 is in use instead of version 3, and stays until it is unpinned.",
        ),
        (NO_LABELS, "note", "Frames get no class until labels are given."),
        (str(ACCOUNT), "trouble", "200 frames could not be read so far: 200 truncated."),
        ("door: frames again", "camera", "door: frames again"),
        ("door: no frame for 10 s", "camera", "door sends no frames: no frame for 10 s"),
        ("the label queue cannot be written (full)", "note", "the label queue cannot be written (full)"),
    ],
)
def test_what_a_run_says_in_plain_words(event, kind, text):
    assert plain(event, ["door"]) == (kind, text)
