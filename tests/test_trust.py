"""Which pictures may be offered as look-alikes, how certain a guess may be, and when more labels no longer help."""

import pytest
import torch
import torch.nn.functional as F

from streamclr.labelling.people import AWAY_SECONDS, People
from streamclr.labelling.trust import USUAL_SIMILARITY, Settled, least_similarity, settled
from streamclr.linear import USUAL_TEMPERATURE, cross_validate, fit_linear, losses_at, temperature_of


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_circle(*degrees):
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_answers_lower_the_similarity_of_look_alikes_as_far_as_pairs_agree():
    """Two classes, 90 degrees apart; within a class pictures are up to 40 degrees apart (similarity 0.77)."""
    degrees = torch.linspace(0, 40, 20)
    labels = torch.arange(40) // 20
    least = least_similarity(on_circle(*degrees.tolist(), *(degrees + 90).tolist()), labels)
    assert 0.5 <= least < 0.7  # between the classes it is 0.64 at most


def test_answers_that_disagree_raise_it():
    labels = torch.arange(40) % 2
    directions = F.normalize(normal(20, 8), dim=1).repeat_interleave(2, 0)  # twins of different classes
    assert least_similarity(directions, labels) > 1.0 - 1e-6  # nothing is offered
    assert least_similarity(directions[:8], labels[:8]) == USUAL_SIMILARITY  # too few to tell


def test_without_similar_answers_it_stays_as_usual():
    assert least_similarity(torch.eye(30), torch.zeros(30, dtype=torch.long)) == USUAL_SIMILARITY
    assert least_similarity(torch.empty(0, 4), torch.empty(0, dtype=torch.long)) == USUAL_SIMILARITY


def calibration_error(probabilities, labels):
    """The difference between how certain guesses are and how many are right, in ten classes of certainty."""
    certain, guess = probabilities.max(1)
    of_bin = (certain * 10).long().clamp(max=9)
    right = (guess == labels).float()
    return sum(
        float((of_bin == b).float().mean() * (certain[of_bin == b].mean() - right[of_bin == b].mean()).abs())
        for b in of_bin.unique()
    )


def clouds(n, spread, seed=0, d=60):
    labels = torch.arange(n) % 5
    return 3 * torch.eye(5, d)[labels] + spread * normal(n, d, seed=seed), labels


@pytest.mark.parametrize("spread", [1.5, 3.0])
def test_guesses_are_as_often_right_as_they_say(spread):
    errors = []
    for seed in range(4):
        features, labels = clouds(60, spread, seed)
        new, truth = clouds(2000, spread, 100 + seed)
        errors.append(calibration_error(fit_linear(features, labels, 5)(new).softmax(1), truth))
    assert sum(errors) / 4 < 0.1


def test_a_classifier_that_is_too_sure_is_cooled_and_names_the_same_classes():
    features, labels = clouds(100, 3.0)
    found = cross_validate(features, labels, 5)
    warm = fit_linear(features, labels, 5, decay=found.decay)
    assert found.temperature > 1.2
    cool = fit_linear(features, labels, 5)
    assert torch.equal(cool(features).argmax(1), warm(features).argmax(1))
    assert torch.allclose(cool(features), warm(features) / found.temperature, atol=1e-5)


def test_few_labels_say_nothing_of_the_temperature_and_some_say_little():
    logits = torch.tensor([[9.0, 0.0]])
    assert temperature_of(losses_at(logits.repeat(9, 1), torch.zeros(9, dtype=torch.long)), 9) is None
    # All right: more certain would be more probable, but ten labels are little beside what is usual.
    few = temperature_of(losses_at(logits.repeat(10, 1), torch.zeros(10, dtype=torch.long)), 10)
    assert few == pytest.approx(USUAL_TEMPERATURE, rel=0.1)
    # A tenth is wrong: the guess has to be 90 % certain, which is a difference of log 9.
    labels = (torch.arange(1000) % 10 == 0).long()
    many = temperature_of(losses_at(logits.repeat(1000, 1), labels), 1000)
    assert many == pytest.approx(9 / torch.tensor(9.0).log().item(), rel=0.07)


def test_a_class_that_no_other_fold_knows_does_not_cool():
    """One label each of many classes: held back, none can be guessed, which says nothing about certainty."""
    features, labels = clouds(60, 0.1)
    alone = torch.cat([labels, torch.arange(5, 25)])
    found = cross_validate(torch.cat([features, 3 * normal(20, 60, seed=3)]), alone, 25)
    assert found.temperature < 1.5


def test_half_of_the_labels_is_compared_with_all():
    features, labels = clouds(60, 0.1, d=5)
    others, truth = clouds(500, 0.1, seed=1, d=5)
    weights, groups = torch.ones(60), torch.arange(60)
    assert settled(features, labels, weights, groups, 1e-2, others, truth) == Settled(500, 500)
    assert Settled(500, 500).is_enough
    noise, named = normal(60, 5), torch.arange(60) % 2
    guesses = fit_linear(noise, named, 2, decay=1e-2)(others).argmax(1)
    found = settled(noise, named, weights, groups, 1e-2, others, guesses)
    assert found.same < 450  # there is nothing to know: each label changes something
    assert not found.is_enough


def test_too_few_labels_cannot_be_halved():
    features, labels = clouds(60, 0.1)
    ones, rows = torch.ones(60), torch.arange(60)
    assert settled(features[:19], labels[:19], ones[:19], rows[:19], 1e-2, features, labels) is None
    labels[0] = 5  # a class with one label
    assert settled(features, labels, ones, rows, 1e-2, features, labels) is None
    assert settled(features, labels % 5, ones, rows, 1e-2, features[:0], labels[:0]) is None


def test_people_are_asked_different_questions_and_in_the_end_the_same():
    now = [0.0]
    people = People(lambda: now[0])
    keys = list("abcdef")
    assert people.share("ada", keys, 2) == ["a", "b"]
    assert people.share("bob", keys, 2) == ["c", "d"]
    assert people.share("ada", keys, 2) == ["a", "b"]
    assert people.share("ada", keys[1:], 2) == ["b", "e"]  # a is answered
    assert people.share("eve", ["b", "c", "f"], 3) == ["f", "c", "b"]  # little is left: she begins at the other end
    assert len(people) == 3
    now[0] += AWAY_SECONDS
    assert people.share("bob", keys, 2) == ["a", "b"]  # the others have closed their pages
    assert len(people) == 1
