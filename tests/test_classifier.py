import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamclr import UserError, resnet18
from streamclr.classifier import Accuracy, Head, draw_labelled, knn_probe, linear_probe, train_head
from streamclr.runs import evaluation
from streamclr.runs.evaluation import curve_point, evaluate, evaluate_supervised, extract, train_supervised
from streamclr.streams.datasets.images import ArrayImages
from support.images import random_images

NAMES = ("ant", "bee", "cat")


def coloured(n, seed=0):
    """Images whose class is their colour: easy, so that what learns at all learns this."""
    images = random_images(n, seed=seed) // 4
    labels = torch.arange(n) % 3
    images[torch.arange(n), labels] += 150
    return ArrayImages(images.numpy(), labels.numpy(), NAMES)


def blobs(n, d=6, seed=0):
    labels = torch.arange(n) % 3
    centres = torch.randn(3, d, generator=torch.Generator().manual_seed(99)) * 4
    return centres[labels] + torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + 50, labels


@settings(max_examples=40)
@given(
    n_each=st.lists(st.integers(5, 60), min_size=2, max_size=5), fraction=st.floats(0.05, 0.99), seed=st.integers(0, 9)
)
def test_the_draw_is_class_balanced(n_each, fraction, seed):
    labels = torch.repeat_interleave(torch.arange(len(n_each)), torch.tensor(n_each))
    classes = tuple(map(str, range(len(n_each))))
    due = round(fraction * len(labels) / len(n_each))
    if due < 1 or due > min(n_each):
        with pytest.raises(UserError):
            draw_labelled(labels, fraction, classes, seed)
        return
    drawn = draw_labelled(labels, fraction, classes, seed)
    assert labels[drawn].bincount(minlength=len(n_each)).tolist() == [due] * len(n_each)
    assert len(drawn.unique()) == len(drawn)
    assert torch.equal(drawn, draw_labelled(labels, fraction, classes, seed))


def test_draws():
    labels = torch.arange(50_000) % 10
    names = tuple("0123456789")
    assert [len(draw_labelled(labels, f, names)) for f in (0.01, 0.1, 1)] == [500, 5000, 50_000]
    assert not torch.equal(draw_labelled(labels, 0.01, names, 1), draw_labelled(labels, 0.01, names, 2))


@pytest.mark.parametrize(
    ("labels", "fraction", "told"),
    [
        ([0] * 90 + [1] * 10, 0.5, "class 'bee' has 10 labelled images, and 50.00% of the labels needs 25"),
        ([0, 1] * 10, 0.01, "at least 0.1"),
        ([0, 1] * 10, 0, "is 0"),
        ([0, 1] * 10, 1.5, "is 1.5"),
        ([0, 1] * 10, float("nan"), "is nan"),
    ],
)
def test_bad_fractions(labels, fraction, told):
    with pytest.raises(UserError, match=told):
        draw_labelled(torch.tensor(labels), fraction, ("ant", "bee"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integer_type(dtype):
    features, labels = blobs(30)
    assert torch.equal(
        train_head(features, labels.to(dtype), 3, epochs=2).linear.weight,
        train_head(features, labels, 3, epochs=2).linear.weight,
    )
    assert torch.equal(
        linear_probe(features, labels.to(dtype), 3)(features), linear_probe(features, labels, 3)(features)
    )
    assert torch.equal(knn_probe(features, labels.to(dtype), features, 3), knn_probe(features, labels, features, 3))
    assert torch.equal(draw_labelled(labels.to(dtype), 0.5, NAMES), draw_labelled(labels, 0.5, NAMES))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda labels: labels.index_fill(0, torch.tensor([4]), -1), r"labels are -1 to 2: use 0 to 2, .* 3 classes"),
        (lambda labels: labels + 1, r"labels are 1 to 3: use 0 to 2, .* 3 classes"),
        (lambda labels: labels.float(), r"labels are torch\.float32: use whole numbers"),
        (lambda labels: labels[None], r"the shape of the labels is \(1, 30\): use one number for each image"),
        (lambda labels: labels[:0], r"the shape of the labels is \(0,\): use one number for each image"),
    ],
)
def test_wrong_labels_are_one_line(wrong, told, model):
    features, labels = blobs(30)
    for function in (
        lambda: train_head(features, wrong(labels), 3),
        lambda: linear_probe(features, wrong(labels), 3),
        lambda: knn_probe(features, wrong(labels), features, 3),
        lambda: draw_labelled(wrong(labels).numpy(), 0.5, NAMES),
        lambda: draw_labelled(wrong(labels).numpy(), 1, NAMES),
    ):
        with pytest.raises(UserError, match=told) as error:
            function()
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="30 labels for 29 images"):
        train_head(features[1:], labels, 3)


def test_wrong_labels_in_an_evaluation(model):
    train, test = coloured(30), coloured(30)
    test.labels = np.where(test.labels == 2, -1, test.labels)
    with pytest.raises(UserError, match="labels are -1 to 1: use 0 to 2"):
        evaluate(model, train, test, (1.0,))
    train.labels, test.labels = train.labels.astype(np.int32), coloured(30).labels.astype(np.int32)
    assert evaluate(model, train, test, (1.0,), classifier="linear")[0]["n_test"] == 30


def test_images_that_are_not_bytes_are_refused(model):
    """Float images count as scaled to 0…1 already, so 0…255 would be read 255 times too bright."""
    whole = coloured(6)
    bright = coloured(6)
    bright.images = lambda numbers: whole.images(numbers).astype(np.float32)
    for function in (
        lambda: extract(model, bright),
        lambda: evaluate(model, bright, whole, (1.0,)),
        lambda: evaluate(model, whole, bright, (1.0,)),
        lambda: train_supervised(lambda: resnet18(width=1), bright, torch.arange(6), epochs=1),
    ):
        with pytest.raises(UserError, match=r"float32: give n x 3 x H x W of uint8, with values 0 to 255"):
            function()


def test_the_encoder_is_frozen_in_stage_two(model):
    """No weight, no BatchNorm statistic, no gradient and no mode moves, in train mode to begin with."""
    model.train()
    before = copy.deepcopy(model.state_dict())
    evaluate(model, coloured(60), coloured(30, seed=1), (0.1, 1.0), classifier="linear")
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert any("running_var" in key for key in after)
    assert all(torch.equal(after[key], before[key]) for key in after)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_features_are_computed_in_eval_mode_and_not_augmented(model):
    images = coloured(40)
    features, labels, numbers, _ = extract(model, images)
    model.eval()
    with torch.no_grad():
        expected = model.features(torch.from_numpy(images.images(np.arange(40))) / 255)
    assert torch.allclose(features, expected, atol=1e-6)
    assert labels.tolist() == images.labels.tolist()
    assert torch.equal(numbers, torch.arange(40))
    assert torch.allclose(extract(model, images, torch.tensor([7, 3])).features, expected[[7, 3]], atol=1e-6)


@pytest.mark.parametrize(
    "train", [lambda x, y: train_head(x, y, 3, epochs=100, lr=1e-2), lambda x, y: linear_probe(x, y, 3)]
)
def test_heads_learn_what_is_linear(train):
    head = train(*blobs(90))
    features, labels = blobs(60, seed=1)
    assert Accuracy.of(head(features).argmax(1), labels, 3).top1 > 0.95
    assert not head.training


def test_the_linear_probe_is_at_its_minimum():
    features, labels = blobs(90)
    probe = linear_probe(features, labels, 3).requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(probe(features), labels) + 1e-3 * probe.linear.weight.square().sum()
    loss.backward()
    assert probe.linear.weight.grad.abs().max() < 1e-3


def test_knn_votes_by_cosine():
    known = torch.tensor([[1.0, 0], [2, 0.1], [0, 5]])
    labels = torch.tensor([0, 0, 1])
    assert knn_probe(known, labels, torch.tensor([[9.0, 1], [1, 9]]), 2, k=2).tolist() == [0, 1]
    features, classes = blobs(90)
    queries, answers = blobs(30, seed=1)
    assert Accuracy.of(knn_probe(features - 50, classes, queries - 50, 3), answers, 3).top1 > 0.9


def test_accuracy_in_all_and_per_class():
    accuracy = Accuracy.of(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 3)
    assert accuracy.top1 == 0.75
    assert accuracy.per_class[:2] == (1, pytest.approx(2 / 3))
    assert accuracy.per_class[2] != accuracy.per_class[2]


def test_evaluate_tells_everything(model):
    train, test = coloured(90), coloured(30, seed=1)
    results, chosen = evaluate(model, train, test, (0.1, 1.0), classifier="paper")
    assert results["n_test"] == 30
    assert results["labels"].keys() == {"0.1", "1.0"}
    assert results["labels"]["0.1"]["n_labels"] == 9
    assert results["labels"]["1.0"]["per_class"].keys() == set(NAMES)
    assert results["linear_probe"] > 0.8
    assert results["knn"] > 0.8
    assert results["labels"]["1.0"]["classifier"] == chosen[1.0].kind == "paper"
    assert chosen[1.0].model is None
    guess = chosen[1.0].head(extract(model, test).features).argmax(1)
    assert Accuracy.of(guess, torch.from_numpy(test.labels), 3).top1 == results["labels"]["1.0"]["accuracy"]
    assert curve_point(model, train, test) > 0.8


@pytest.mark.parametrize(("classifier", "kind"), [("linear", "linear"), ("finetuned", "finetuned"), ("auto", "linear")])
def test_each_kind_of_classifier_is_tested_with_its_own_encoder(model, monkeypatch, classifier, kind):
    monkeypatch.setattr(evaluation, "fine_tune", partial(evaluation.fine_tune, steps=20, lr=3e-3))
    monkeypatch.setattr(evaluation, "choose_classifier", partial(evaluation.choose_classifier, steps=20))
    train, test = coloured(60), coloured(30, seed=1)
    results, chosen = evaluate(model, train, test, (1.0,), classifier=classifier)
    entry, one = results["labels"]["1.0"], chosen[1.0]
    assert (entry["classifier"], one.model is None) == (kind, kind == "linear")
    guess = one.head(extract(one.model or model, test).features).argmax(1)
    assert entry["accuracy"] == Accuracy.of(guess, torch.from_numpy(test.labels), 3).top1 > 0.5
    reason = {"linear": "linear: as asked", "finetuned": "fine-tuned: as asked", "auto": "linear: 12 of 12 held-back"}
    assert entry["why"].startswith(reason[classifier])


def test_above_so_many_labels_auto_is_linear(model, monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_LABELS_TUNED", 59)
    results, _ = evaluate(model, coloured(60), coloured(30), (1.0,))
    assert results["labels"]["1.0"]["why"] == "linear: 60 labels, and auto fine-tunes on 59 at most"
    with pytest.raises(UserError, match=r"no classifier 'forest': use auto, linear, finetuned, selftrained, paper"):
        evaluate(model, coloured(60), coloured(30), (1.0,), classifier="forest")


def test_images_that_do_not_fit_are_read_when_they_are_due(model, monkeypatch):
    monkeypatch.setattr(evaluation, "fine_tune", partial(evaluation.fine_tune, steps=2))
    found = []
    for most in (evaluation.MAX_BYTES, 0):
        monkeypatch.setattr(evaluation, "MAX_BYTES", most)
        found.append(evaluate(model, coloured(60), coloured(30), (0.5,), classifier="finetuned")[1][0.5].head)
    assert torch.equal(found[0].linear.weight, found[1].linear.weight)


def test_both_readings_of_the_supervised_baseline():
    results = evaluate_supervised(lambda: resnet18(width=4), coloured(90), coloured(30, seed=1), (1.0,))
    assert results["1.0"].keys() == {"end_to_end", "untrained_encoder"}
    assert results["1.0"]["end_to_end"] > 0.9


def test_supervised_is_deterministic_and_moves_the_encoder():
    data, state = coloured(12), torch.get_rng_state()
    models = [
        train_supervised(lambda: resnet18(width=4), data, torch.arange(12), epochs=2, seed=s)[0] for s in (0, 0, 1)
    ]
    weights = [m.encoder.conv1.weight for m in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_head_is_what_torchs_adam_makes_of_the_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(70, 6, generator=generator), torch.randint(4, (70,), generator=generator)
    head = train_head(features, labels, 4, epochs=5, lr=1e-2, batch_size=16, seed=3)
    slow = Head(6, 4)
    slow.fit_scale(features)
    optimizer = torch.optim.Adam(slow.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        for batch in torch.randperm(70, generator=generator).split(16):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(slow(features[batch]), labels[batch]).backward()
            optimizer.step()
    assert torch.allclose(head.linear.weight, slow.linear.weight, atol=1e-6)
    assert torch.allclose(head.linear.bias, slow.linear.bias, atol=1e-6)
