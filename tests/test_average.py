import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamclr import UserError
from streamclr.fleet.average import MAX_LENGTH_RATIO, Average, Update, exchanged, is_statistic

START = {"a": torch.zeros(3, 2), "bn.running_mean": torch.zeros(2), "bn.running_var": torch.ones(2)}


def update(device, shift=1.0, n=10, **changes):
    weights = {name: tensor + (shift if name == "a" else 0.1) for name, tensor in START.items()}
    return Update(device, weights | changes, n, loss=shift)


def test_the_mean_is_weighted_by_the_images():
    average = Average(START)
    done = average.take([update("1", 1.0, 30), update("2", 2.0, 10)], n_asked=3)
    assert torch.allclose(average.weights["a"], torch.full((3, 2), 1.25))
    assert torch.allclose(average.weights["bn.running_var"], torch.full((2,), 1.1))
    assert (done.taken, done.n_images, done.n_asked, done.loss) == (["1", "2"], 40, 3, 1.25)
    assert done.moved == pytest.approx(1.25 * math.sqrt(6))
    assert torch.equal(average.kept["a"], average.weights["a"])


@given(st.lists(st.tuples(st.floats(0.5, 2), st.integers(1, 100)), min_size=1, max_size=8))
def test_the_mean_lies_between_the_updates_and_does_not_depend_on_their_order(given_):
    updates = [update(str(i), shift, n) for i, (shift, n) in enumerate(given_)]
    forth, back = Average(START), Average(START)
    forth.take(updates)
    back.take(updates[::-1])
    assert torch.allclose(forth.weights["a"], back.weights["a"])
    shifts = [shift for shift, _ in given_]
    assert min(shifts) - 1e-5 <= float(forth.weights["a"][0, 0]) <= max(shifts) + 1e-5


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (update("bad", a=torch.full((3, 2), math.nan)), "not finite"),
        (update("bad", a=torch.full((3, 2), math.inf)), "not finite"),
        (update("bad", **{"bn.running_var": torch.full((2,), -1.0)}), "a negative variance"),
        (update("bad", a=torch.zeros(3, 3)), "weights of another model"),
        (update("bad", a=torch.zeros(3, 2).double()), "weights of another model"),
        (update("bad", more=torch.zeros(1)), "weights of another model"),
        (update("bad", n=0), "no images"),
        (update("bad", 1.01 * MAX_LENGTH_RATIO), "too far from the others"),
        (update("bad", **{"bn.running_mean": torch.full((2,), 100.0)}), "too far from the others"),
    ],
)
def test_a_broken_or_poisoned_update_is_refused_and_changes_nothing(bad, why):
    sound, average = [update(str(i)) for i in range(3)], Average(START)
    done = average.take([*sound, bad], n_asked=4)
    assert done.refused == {"bad": why}
    without = Average(START)
    without.take(sound)
    assert all(torch.equal(average.weights[name], without.weights[name]) for name in START)


def test_with_too_few_for_a_median_the_rounds_before_say_what_is_far():
    average = Average(START)
    average.take([update("1"), update("2"), update("3")])
    moved = {name: tensor.clone() for name, tensor in average.weights.items()}
    far = Update("4", {n: t + (1.1 * MAX_LENGTH_RATIO if n == "a" else 0.0) for n, t in moved.items()}, 10)
    assert average.take([far]).refused == {"4": "too far from the others"}
    assert torch.equal(average.weights["a"], moved["a"])


def test_nothing_left_leaves_the_encoder_as_it_is():
    average = Average(START)
    done = average.take([update("1", a=torch.full((3, 2), math.nan))])
    assert torch.equal(average.weights["a"], START["a"])
    assert (done.taken, average.n_rounds) == ([], 1)


def test_a_device_cannot_claim_more_images_than_it_was_asked_for():
    average = Average(START, most_images=10)
    average.take([update("1", 1.0, 10), update("2", 2.0, 10**9)])
    assert torch.allclose(average.weights["a"], torch.full((3, 2), 1.5))


def test_momentum_adds_what_is_left_of_the_step_before_but_not_to_statistics():
    average = Average(START, momentum=0.5)
    average.take([update("1")])
    step = {name: tensor + (1.0 if name == "a" else 0.0) for name, tensor in average.weights.items()}
    average.take([Update("1", step, 10)])
    assert torch.allclose(average.weights["a"], torch.full((3, 2), 2.5))  # 1, then 1 + 0.5
    assert torch.allclose(average.weights["bn.running_var"], torch.full((2,), 1.1))


def test_the_kept_encoder_moves_slowly_behind():
    average = Average(START, slow=0.75)
    average.take([update("1")])
    assert torch.allclose(average.weights["a"], torch.ones(3, 2))
    assert torch.allclose(average.kept["a"], torch.full((3, 2), 0.25))


def test_state_goes_on_as_if_never_stopped():
    one, two = Average(START, momentum=0.9, slow=0.5), Average(START, momentum=0.9, slow=0.5)
    one.take([update("1"), update("2", 1.5)])
    two.load_state_dict(one.state_dict())
    for average in (one, two):
        average.take([update("1", 2.0)])
    assert all(torch.equal(one.kept[name], two.kept[name]) for name in START)
    assert one.n_rounds == two.n_rounds == 2
    with pytest.raises(UserError, match="another encoder"):
        Average({"b": torch.zeros(1)}).load_state_dict(one.state_dict())


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"momentum": -0.1}, {"slow": 1.5}])
def test_wrong_options_are_told(options):
    with pytest.raises(UserError, match="below 1"):
        Average(START, **options)


def test_what_is_exchanged_are_weights_and_statistics_and_no_constants(model):
    shared, local = exchanged(model), exchanged(model, "local")
    assert {name for name in shared if is_statistic(name)} == shared.keys() - local.keys() != set()
    assert local.keys() == dict(model.named_parameters()).keys()
    assert all(tensor.is_floating_point() for tensor in shared.values())
