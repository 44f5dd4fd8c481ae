"""The linear classifier, fine-tuning, the choice between them, and classifiers with an encoder of their own."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from streamclr import UserError, resnet18
from streamclr.classifier import Classifier, Head
from streamclr.encoders.inference import seeded
from streamclr.encoders.projection import ContrastiveModel
from streamclr.linear import DECAYS, DEFAULT_DECAY, cross_validate, fit_linear, folds_of
from streamclr.models.export import export
from streamclr.models.heads import Heads
from streamclr.models.predict import open_predictor
from streamclr.stage_two import Unlabelled, _drawn, choose_classifier, features_of, fine_tune, guess_labels, self_train
from support.images import random_images
from support.runs import made_run

tune = partial(fine_tune, quiet=True)
choose = partial(choose_classifier, quiet=True)


def random_model(seed=0):
    with seeded(seed):
        return ContrastiveModel(resnet18(width=4)).eval()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clouds(n, d=8, n_classes=3, seed=0, spread=1.0):
    labels = torch.arange(n) % n_classes
    return 2 * normal(n_classes, d, seed=99)[labels] + spread * normal(n, d, seed=seed) + 5, labels


def stripes(n, seed=0, size=16):
    """Images whose class is the direction of faint stripes, in any colour and phase: not linear in random features."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    phase = torch.randint(4, (n, 1), generator=generator)
    wave = ((torch.arange(size) + phase) % 4 // 2 * 60 - 30)[:, None, None, :].expand(n, 3, size, size)
    pattern = torch.where(labels[:, None, None, None] == 0, wave, wave.transpose(2, 3))
    colour = torch.randint(60, 196, (n, 3, 1, 1), generator=generator)
    noise = 12 * torch.randn(n, 3, size, size, generator=generator)
    return (colour + pattern + noise).clamp(0, 255).byte(), labels


def coloured(n, seed=0, size=16):
    images = random_images(n, size, seed) // 4
    labels = torch.arange(n) % 3
    images[torch.arange(n), labels] += 150
    return images, labels


def accuracy(model, head, images, labels):
    return float((head(features_of(model, images, len(labels))).argmax(1) == labels).float().mean())


# ----------------------------------------------------------------------------------------------------------------------
# The linear classifier.


@pytest.mark.parametrize("d", [8, 200], ids=["more labels than features", "more features than labels"])
@pytest.mark.parametrize("decay", DECAYS)
def test_the_linear_classifier_is_at_its_minimum(d, decay):
    features, labels = clouds(60, d)
    weights = 0.5 + torch.arange(60) % 3
    head = fit_linear(features, labels, 3, weights=weights, decay=decay).double().requires_grad_()
    shares = (weights / weights.sum()).double()
    mean = (shares[:, None] * features).sum(0)
    assert torch.allclose(head.mean, mean, atol=1e-5)
    assert torch.allclose(head.std, (shares[:, None] * (features - mean).square()).sum(0).sqrt(), atol=1e-5)
    losses = F.cross_entropy(head(features.double()), labels, reduction="none")
    loss = (shares * losses).sum() + decay * head.linear.weight.square().sum()
    loss.backward()
    assert head.linear.weight.grad.abs().max() < 1e-4
    assert head.linear.bias.grad.abs().max() < 1e-4


def test_a_weight_is_worth_as_many_labels():
    features, labels = clouds(30)
    times = 1 + torch.arange(30) % 3
    repeated = fit_linear(features.repeat_interleave(times, 0), labels.repeat_interleave(times), 3, decay=1e-2)
    weighted = fit_linear(features, labels, 3, weights=times.float() / 3, decay=1e-2)
    assert torch.allclose(repeated(features), weighted(features), atol=1e-2)
    assert not torch.allclose(fit_linear(features, labels, 3, decay=1e-2)(features), weighted(features), atol=1e-2)


def test_the_decay_fits_the_noise():
    """Where the labels are noise in most features, a strong decay is chosen, and it is better on new images."""
    noisy, labels = clouds(60, 100, spread=8.0)
    clean, _ = clouds(60, 100, spread=0.1)
    assert cross_validate(noisy, labels, 3).decay > cross_validate(clean, labels, 3).decay
    new, truth = clouds(600, 100, seed=1, spread=8.0)
    chosen, weak = fit_linear(noisy, labels, 3), fit_linear(noisy, labels, 3, decay=min(DECAYS))
    of_chosen, of_weak = (F.cross_entropy(head(new), truth) for head in (chosen, weak))
    assert of_chosen < of_weak
    assert torch.equal(fit_linear(noisy, labels, 3).linear.weight, chosen.linear.weight)


def test_with_too_few_labels_to_hold_back_the_decay_is_the_default():
    features, labels = clouds(9)
    head, default = fit_linear(features, labels, 3), fit_linear(features, labels, 3, decay=DEFAULT_DECAY)
    assert torch.equal(head.linear.weight, default.linear.weight)
    assert cross_validate(features, labels, 3).n == 9  # that many can be tested
    few = cross_validate(features[:4], labels[:4], 3)
    assert (few.decay, few.right, few.n, few.temperature) == (DEFAULT_DECAY, 0, 0, None)
    assert cross_validate(features, labels, 3, groups=torch.arange(9) // 3).n == 0


def test_a_leak_between_frames_of_a_track_is_not_rewarded():
    """Each track has a look of its own and a class by chance: only who has seen the track knows its class."""
    tracks = torch.arange(200) // 5
    labels = torch.randint(2, (40,), generator=torch.Generator().manual_seed(0))[tracks]
    features = 3 * normal(40, 60)[tracks] + 0.3 * normal(200, 60, seed=1)
    leaking, honest = cross_validate(features, labels, 2), cross_validate(features, labels, 2, groups=tracks)
    assert leaking.right > 190
    assert honest.right < 140
    assert honest.n == 200
    assert honest.decay > leaking.decay


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=60))
def test_a_group_is_in_one_fold_and_folds_are_as_large_as_they_can_be(rows):
    groups, labels = (torch.tensor(column) for column in zip(*rows, strict=True))
    fold = folds_of(labels, groups)
    of_group = {int(g): set(fold[groups == g].tolist()) for g in groups}
    assert all(len(folds) == 1 for folds in of_group.values())
    sizes = torch.tensor([min(folds) for folds in of_group.values()]).bincount(minlength=5)
    assert sizes.max() - sizes.min() <= 1


def test_labels_that_were_spread_are_not_tested():
    features, labels = clouds(60)
    weights = torch.where(torch.arange(60) < 20, 1.0, 0.4)
    wrong = torch.where(weights < 1, (labels + 1) % 3, labels)
    groups = torch.arange(60) % 20  # a given label, and two spread from it
    found = cross_validate(features, labels, 3, weights, groups)
    assert (found.n, found.right) == (20, 20)
    assert cross_validate(features, wrong, 3, weights, groups).n == 20


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"weights": torch.ones(29)}, r"weights of shape \(29,\) for 30 labels"),
        ({"weights": torch.zeros(30)}, "a number above 0"),
        ({"weights": torch.full((30,), torch.nan)}, "a number above 0"),
        ({"groups": torch.arange(29)}, r"groups of shape \(29,\) for 30 labels"),
        ({"groups": torch.rand(30)}, "a whole number each"),
    ],
)
def test_wrong_weights_and_groups_are_one_line(wrong, told):
    features, labels = clouds(30)
    with pytest.raises(UserError, match=told) as error:
        fit_linear(features, labels, 3, **wrong)
    assert "\n" not in str(error.value)


def test_features_that_are_no_numbers_give_probabilities_that_are_none():
    """A run whose encoder broke still ends, and says so."""
    features, labels = clouds(30, 40)
    features[3, 2] = torch.nan
    assert not fit_linear(features, labels, 3)(features).isfinite().any()


# ----------------------------------------------------------------------------------------------------------------------
# Fine-tuning.


def test_fine_tuning_learns_what_is_not_linear_in_the_features():
    model, (images, labels), (new, truth) = random_model(), stripes(80), stripes(100, seed=1)
    linear = fit_linear(features_of(model, images, 80), labels, 2)
    assert accuracy(model, linear, new, truth) < 0.75
    assert accuracy(*tune(model, images, labels, 2, steps=80, lr=3e-3), new, truth) > 0.9


def test_the_given_model_stays_as_it_is():
    model, (images, labels) = random_model().train(), coloured(12)
    model.encoder.conv1.requires_grad_(False)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tuned, head = tune(model, images, labels, 3, steps=2)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.encoder.layer1.modules())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["encoder.conv1.weight"]
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in [*tuned.modules(), *head.modules()])
    changed = {name for name, tensor in tuned.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"encoder.conv1.weight", "encoder.bn1.weight", "encoder.bn1.running_mean"} <= changed
    assert not any(name.startswith("head.") for name in changed)  # the projection head takes no part


def test_fine_tuning_is_deterministic_by_its_seed():
    images, labels = coloured(12)
    models = [tune(random_model(), images, labels, 3, steps=2, seed=seed) for seed in (0, 0, 1)]
    weights = [model.encoder.conv1.weight for model, _ in models]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(models[0][1].linear.weight, models[1][1].linear.weight)
    assert not torch.equal(weights[0], weights[2])


def test_images_may_be_read_when_they_are_due():
    images, labels = coloured(12)
    asked = []

    def read(numbers):
        asked.append(len(numbers))
        return images[numbers].numpy()

    model, _ = tune(random_model(), images, labels, 3, steps=2)
    same, _ = tune(random_model(), read, labels, 3, steps=2)
    assert torch.equal(model.encoder.conv1.weight, same.encoder.conv1.weight)
    assert asked == [64, 64]
    assert torch.equal(features_of(model, images, 12), features_of(model, read, 12))


def test_a_part_of_the_encoder_and_a_head_that_knows_something():
    model, (images, labels) = random_model(), coloured(60)
    tuned, head = tune(model, images, labels, 3, steps=1, lr=1e-6, train="1", head="linear")
    assert torch.equal(tuned.encoder.conv1.weight, model.encoder.conv1.weight)
    assert torch.equal(tuned.encoder.bn1.running_mean, model.encoder.bn1.running_mean)
    linear = fit_linear(features_of(model, images, 60), labels, 3)
    assert torch.allclose(head.linear.weight, linear.linear.weight, atol=1e-4)
    for wrong, told in (({"head": "ones"}, "head is 'ones'"), ({"steps": 0}, "steps is 0"), ({"train": "x"}, "train")):
        with pytest.raises(UserError, match=told):
            tune(model, images, labels, 3, **wrong)


def test_images_are_drawn_as_often_as_their_weights_say():
    weights = torch.tensor([1.0, 0.5, 1.0, 0.1])
    drawn = _drawn(weights, 640, torch.Generator().manual_seed(0))
    assert (drawn.bincount(minlength=4) - 640 * weights / weights.sum()).abs().max() <= 1
    assert not torch.equal(drawn, drawn.sort().values)


# ----------------------------------------------------------------------------------------------------------------------
# The choice.


def test_fine_tuning_is_chosen_where_it_is_better():
    images, labels = stripes(80)
    chosen = choose(random_model(), images, labels, 2, steps=80, lr=3e-3)
    (linear, of_linear), (tuned, of_tuned) = chosen.tried
    assert (chosen.kind, linear, tuned) == ("finetuned", "linear", "fine-tuned")
    assert (chosen.right, chosen.n_held_back) == (of_tuned, 16)
    assert chosen.why == f"fine-tuned: {of_tuned} of 16 held-back labels right, linear {of_linear}"
    new, truth = stripes(100, seed=1)
    assert accuracy(chosen.model, chosen.head, new, truth) > 0.9


def test_the_linear_one_is_chosen_where_it_is_as_good():
    images, labels = coloured(60)
    chosen = choose(random_model(), images, labels, 3, steps=40, lr=3e-3)
    assert (chosen.kind, chosen.model, dict(chosen.tried)["linear"]) == ("linear", None, 12)
    assert chosen.why.startswith("linear: 12 of 12 held-back labels right, fine-tuned ")
    all_labels = fit_linear(features_of(random_model(), images, 60), labels, 3)
    assert torch.equal(chosen.head.linear.weight, all_labels.linear.weight)


def test_the_public_encoder_is_chosen_where_the_adapted_one_is_worse():
    images, labels = coloured(60)
    broken, good = random_model(), random_model(seed=1)
    torch.nn.init.zeros_(broken.encoder.conv1.weight)
    chosen = choose(broken, images, labels, 3, public=good, kinds=("linear",))
    assert (chosen.kind, chosen.is_public, chosen.model) == ("linear", True, good)
    assert chosen.why.startswith("public encoder linear: 12 of 12 held-back labels right, linear ")
    chosen = choose(good, images, labels, 3, public=random_model(), kinds=("linear",))
    assert (chosen.is_public, chosen.model) == (False, None)  # of equals the adapted one


class Sure(Head):
    """Says the class with the probability that the image's first pixel says, in %."""

    def __init__(self):
        super().__init__(1, 2)

    def forward(self, features):
        p = features[:, 0].clamp(0.01, 0.99)
        return torch.stack([(1 - p).log(), p.log()], 1)


def test_a_scene_is_labelled_where_its_frames_together_are_sure(monkeypatch):
    images = torch.zeros(7, 3, 8, 8, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.tensor([99, 90, 60, 99, 40, 10, 5])
    monkeypatch.setattr("streamclr.stage_two.features_of", lambda model, images, n: images[:, :1, 0, 0].float() / 100)
    scenes = torch.tensor([4, 4, 4, 7, 7, 2, 2])  # means 0.83, 0.70, 0.075
    rows, labels = guess_labels(random_model(), Sure(), Unlabelled(images, scenes))
    assert rows.tolist() == [0, 1, 2, 5, 6]
    assert labels.tolist() == [1, 1, 1, 0, 0]


def test_self_training_draws_labels_and_guesses_with_their_own_images(monkeypatch):
    labelled, others = random_images(4, seed=1), random_images(6, seed=2)
    seen, rows, guesses = [], [5, 1, 0, 2, 3, 4], [1, 0, 0, 0, 0, 0]
    monkeypatch.setattr("streamclr.stage_two.guess_labels", lambda *_: (torch.tensor(rows), torch.tensor(guesses)))
    monkeypatch.setattr("streamclr.stage_two.fine_tune", lambda *parts, **_: seen.append(parts))
    labels, unlabelled = torch.tensor([0, 1, 0, 1]), Unlabelled(others, torch.arange(6))
    self_train(random_model(), (random_model(), Head(32, 2)), labelled, labels, unlabelled)
    _, image_of, targets, n_classes, weights = seen[0]
    assert torch.equal(image_of(np.array([4, 0, 5, 3])), torch.stack([others[5], labelled[0], others[1], labelled[3]]))
    assert torch.equal(image_of(np.array([5])), others[1:2])
    assert (targets.tolist(), n_classes) == ([0, 1, 0, 1, *guesses], 2)
    # One guess counts for a half at most, and five together as much as the two labels of their class.
    assert weights.tolist() == pytest.approx([1, 1, 1, 1, 0.5, *[0.4] * 5])


def test_self_training_uses_frames_without_a_label():
    """Few labels, and many scenes of stripes."""
    (few, labels), (many, classes), (tested, truth) = stripes(12), stripes(240, seed=1), stripes(100, seed=2)
    order = classes.argsort(stable=True)
    unlabelled = Unlabelled(many[order], torch.arange(240) // 8)
    model = random_model()
    chosen = choose(
        model, few, labels, 2, kinds=("finetuned", "selftrained"), unlabelled=unlabelled, steps=60, flip=True
    )
    assert dict(chosen.tried).keys() == {"fine-tuned", "self-trained"}
    teacher = tune(model, few, labels, 2, steps=60, flip=True)
    pupil = self_train(model, teacher, few, labels, unlabelled, steps=60, flip=True, quiet=True)

    def accuracy(own, head):
        return float((head(features_of(own, tested, len(tested))).argmax(1) == truth).float().mean())

    assert accuracy(*pupil) > accuracy(*teacher)


def test_self_training_without_other_frames_is_not_tried():
    images, labels = stripes(40)
    assert "self-trained" not in dict(choose(random_model(), images, labels, 2, steps=5).tried)
    with pytest.raises(UserError, match="selftrained needs other frames"):
        choose(random_model(), images, labels, 2, kinds=("selftrained",))


def test_with_too_few_labels_the_linear_one_is_taken():
    images, labels = coloured(9)
    chosen = choose(random_model(), images, labels, 3)
    assert (chosen.kind, chosen.model, chosen.tried, chosen.accuracy) == ("linear", None, (), None)
    assert chosen.why == "linear: 9 labels are too few to hold some back"
    chosen = choose(random_model(), images, labels, 3, kinds=("finetuned",), steps=1)
    assert chosen.kind == "finetuned"
    with pytest.raises(UserError, match="kinds is"):
        choose(random_model(), images, labels, 3, kinds=("forest",))


def test_frames_of_one_track_are_never_on_both_sides_of_the_choice():
    tracks = torch.arange(100) // 5
    labels = torch.randint(2, (20,), generator=torch.Generator().manual_seed(3))[tracks]
    images = random_images(20)[tracks]
    leaking = choose(random_model(), images, labels, 2, kinds=("linear",))
    honest = choose(random_model(), images, labels, 2, groups=tracks, kinds=("linear",))
    assert (leaking.right, leaking.n_held_back, honest.n_held_back) == (20, 20, 20)
    assert honest.right < 18


def test_spread_labels_are_trained_on_and_never_tested():
    images, labels = coloured(90)
    weights, groups = torch.where(torch.arange(90) % 3 == 0, 1.0, 0.3), torch.arange(90) // 3
    labels = labels[3 * groups]
    images[torch.arange(90), labels] |= 128
    chosen = choose(random_model(), images, labels, 3, weights, groups, kinds=("linear",))
    assert chosen.n_held_back == 6  # a fifth of the thirty that a person gave


# ----------------------------------------------------------------------------------------------------------------------
# A classifier with an encoder of its own.


@pytest.fixture
def tuned(tmp_path):
    """A run directory, and a classifier that was fine-tuned from its encoder."""
    directory = made_run(tmp_path / "run")
    labels = torch.arange(20) % 5
    model, head = tune(directory.load_model(), random_images(20, 32), labels, 5, steps=3)
    assert not torch.equal(model.encoder.conv1.weight, directory.load_model().encoder.conv1.weight)
    return directory, model, head


def test_a_saved_classifier_has_its_encoder_and_others_have_the_runs(tuned):
    directory, model, head = tuned
    heads, images = Heads(directory), random_images(7, 32, 9)
    expected = Classifier(model, head, "abcde", 32).probabilities(images)
    plain = Head(model.n_features, 5)
    heads.save_fractions({0.1: plain, 1.0: head}, tuple("abcde"), {1.0: model})
    assert [info.has_encoder for info in heads.by_fraction().values()] == [False, True]
    assert torch.equal(heads.load().probabilities(images), expected)
    own, runs = (heads.load(fraction).model.encoder.conv1.weight for fraction in (1.0, 0.1))
    assert torch.equal(own, model.encoder.conv1.weight)
    assert torch.equal(runs, directory.load_model().encoder.conv1.weight)


def test_a_run_that_learns_on_does_not_change_it(tuned):
    directory, model, head = tuned
    heads, images = Heads(directory), random_images(7, 32, 9)
    expected = Classifier(model, head, "vwxyz", 32).probabilities(images)
    about = list("vwxyz"), "the encoder of step 3", 20, 0.75
    heads.save_labelled(head, *about, 4, "finetuned", model)
    assert torch.equal(heads.load().probabilities(images), expected)
    info = heads.labelled()
    assert (info.kind, info.state) == ("finetuned", "the encoder of step 3, fine-tuned")
    assert info.measured == "4 held back of 20 labels that a person gave"
    heads.save_labelled(head, *about)
    with pytest.raises(UserError, match="is for the encoder of step 3, not for the finished encoder"):
        heads.load()


def test_a_damaged_encoder_is_one_line_with_its_file(tuned):
    directory, model, head = tuned
    model.encoder.conv1 = torch.nn.Conv2d(3, 5, 3, bias=False)
    Heads(directory).save_fractions({1.0: head}, tuple("abcde"), {1.0: model})
    with pytest.raises(UserError, match=r"classifier\.safetensors does not fit the model: encoder\.conv1") as error:
        Heads(directory).load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", ["pretrained", pytest.param("onnx", marks=pytest.mark.system)])
def test_it_is_exported_with_its_encoder(tuned, format):
    if format == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    directory, model, head = tuned
    Heads(directory).save_labelled(head, list("vwxyz"), "the encoder of step 3", 20, 0.75, 4, "finetuned", model)
    file, parity = export(directory, format)
    assert parity.problem is None
    images = random_images(7, 32, 9)
    expected = Classifier(model, head, "vwxyz", 32).probabilities(images)
    predictor = open_predictor(file)
    assert predictor.classes == list("vwxyz")
    assert torch.allclose(torch.from_numpy(predictor.classify(images.numpy())), expected, atol=1e-4)
    if format == "pretrained":
        card = (file / "README.md").read_text()
        assert "trained on labels\ntogether with the encoder" in card
        assert "the encoder of step 3, fine-tuned" in card
