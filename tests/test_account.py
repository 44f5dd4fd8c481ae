from collections import Counter

from streamclr.streams.account import Account


def test_what_was_passed_over_later_could_be_classified():
    passed = Counter({"overload": 5, "fps": 2, "undone": 8, "learner busy": 16, "learner stopped": 3})
    account = Account(received=100, learned=60, passed=passed, rejected=Counter(truncated=6))
    assert account.is_balanced
    assert account.classifiable == 60 + 8 + 16 + 3


def test_a_state_from_before_there_were_predictions_is_read():
    state = Account(3, 2, Counter(fps=1), predicted=2).state_dict()
    assert Account.of(state) == Account(3, 2, Counter(fps=1), predicted=2)
    del state["predicted"]
    assert Account.of(state) == Account(3, 2, Counter(fps=1))


def test_a_line_for_people():
    account = Account(9, 6, Counter(fps=2), Counter(blank=1))
    assert str(account) == "9 frames = 6 learned from + 2 passed over (2 fps) + 1 rejected (1 blank)"
    account.predicted = 6
    assert str(account).endswith("(1 blank); 6 classified")
