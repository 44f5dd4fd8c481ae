"""The heads of a run directory: which there are, which is the default, and what is wrong with a damaged one."""

import pytest
import torch

from streamclr import Pretrained, UserError, save_pretrained
from streamclr.base.tensors import load_tensors, save_tensors
from streamclr.classifier import Classifier, Head
from streamclr.models.heads import GLOBAL, Heads
from streamclr.models.versions import Score, Version, Versions
from streamclr.records.directory import FINISHED
from support.images import random_images
from support.runs import made_run


@pytest.fixture
def heads(tmp_path):
    return Heads(made_run(tmp_path / "run"))


def head_of(n_classes, n_features=32):
    head = Head(n_features, n_classes)
    torch.nn.init.normal_(head.linear.weight)
    return head


def serve(heads, names=("x", "y")):
    classifier = Classifier(heads.directory.load_model(), head_of(len(names)), names, 32)
    keys = frozenset("abc"), frozenset("de")
    return Versions(heads.directory).take(Version(classifier, 7, *keys, Score(1, 2, 0.5)), None)


def test_every_kind_is_listed_and_the_default_is_first(heads):
    (only,) = heads.all()
    assert (only.chosen_by, only.classes, only.n_labels, only.encoder) == (
        "--fraction 1.0",
        list("abcde"),
        None,
        FINISHED,
    )
    assert heads.default() == (only, "the largest label fraction comes first")
    heads.save_fractions({0.1: head_of(5), 0.01: head_of(5), 1.0: head_of(5)}, tuple("abcde"))
    entry = {"n_labels": 50, "accuracy": 0.25}
    heads.directory.save_results({"images": 48, "n_test": 200, "labels": {"0.1": entry}})
    serve(heads)
    save_pretrained(Pretrained(heads.directory.load_model(), head_of(3), "pqr", 32), heads.path / GLOBAL)
    heads.save_labelled(head_of(2), ["no", "yes"], FINISHED, 12, 0.75)
    labelled, *fractions, version, fleet = heads.all()
    assert heads.default() == (labelled, "a person's answers come first")
    assert (labelled.classes, labelled.n_labels, labelled.accuracy) == (["no", "yes"], 12, 0.75)
    assert [head.fraction for head in fractions] == [1.0, 0.1, 0.01]
    assert (fractions[1].n_labels, fractions[1].accuracy) == (50, 0.25)
    assert fractions[1].measured == "200 test images, classifier from 50 labels"
    assert (version.name, version.classes, version.n_labels, version.accuracy) == ("version 1", ["x", "y"], 3, 0.5)
    assert (version.chosen_by, version.encoder) == ("--served", "the encoder of step 7")
    assert (fleet.classes, fleet.chosen_by) == (list("pqr"), str(heads.path / GLOBAL))
    heads.forget_labelled()
    assert heads.default()[0] == fractions[0]


def test_loading_gives_what_was_saved(heads):
    small, large, own = head_of(5), head_of(5), head_of(2)
    heads.save_fractions({0.1: small, 1.0: large}, tuple("abcde"))
    served, images = serve(heads), random_images(3, 32)
    assert torch.equal(heads.load().head.linear.weight, large.linear.weight)
    assert torch.equal(heads.load(0.1).head.linear.weight, small.linear.weight)
    assert torch.equal(heads.load(served=True).probabilities(images), served.probabilities(images))
    heads.save_labelled(own, ["no", "yes"], FINISHED, 12, None)
    assert torch.equal(heads.load().head.linear.weight, own.linear.weight)
    assert (heads.load().classes, heads.load().size) == (["no", "yes"], 32)
    assert torch.equal(heads.load(0.1).head.linear.weight, small.linear.weight)


def test_a_head_that_is_not_there(heads):
    with pytest.raises(UserError, match=r"no classifier for the fraction 0\.5: use 1\.0"):
        heads.load(0.5)
    with pytest.raises(UserError, match="serves no version"):
        heads.load(served=True)
    heads.fractions_file.unlink()
    with pytest.raises(UserError, match=r"has no classifier yet: its stream has no labels, and it kept no images"):
        heads.load()
    served = serve(heads)
    assert heads.load().classes == served.classes  # while a run with --predict learns
    with pytest.raises(UserError, match=r"use --served for version 1$"):
        heads.find()
    heads.save_labelled(head_of(2), ["no", "yes"], FINISHED, 12, None)
    with pytest.raises(UserError, match="has no classifier"):  # never another than the one asked for
        heads.load(1.0)


def test_a_head_for_another_encoder(heads):
    heads.save_labelled(head_of(2), ["no", "yes"], "the encoder of step 3", 12, None)
    with pytest.raises(UserError, match="is for the encoder of step 3, not for the finished encoder, and a person's"):
        heads.load()
    assert heads.load(1.0).classes == list("abcde")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("1.0/linear.weight"), "has no head: linear.weight"),
        (lambda state: state.update({"1.0/linear.weight": torch.zeros(5)}), "has no head: linear.weight"),
        (lambda state: state.pop("1.0/mean"), "mean is missing"),
        (lambda state: state.update({"1.0/std": torch.ones(9)}), r"std is \[9\], not \[32\]"),
        (lambda state: state.update({"1.0/more": torch.ones(9)}), "more is not known"),
    ],
)
def test_a_damaged_head_is_one_line_with_its_file(heads, change, told):
    state = load_tensors(heads.fractions_file)
    change(state)
    save_tensors(heads.fractions_file, state)
    with pytest.raises(UserError, match=rf"classifier\.safetensors .*{told}") as error:
        heads.load()
    assert "\n" not in str(error.value)


def test_what_does_not_belong_together_is_no_classifier(heads):
    model = heads.directory.load_model()
    with pytest.raises(UserError, match="2 class names for a head of 3 classes"):
        Classifier(model, head_of(3), ["a", "b"], 32)
    with pytest.raises(UserError, match="the head takes 9 features, the encoder has 32"):
        Classifier(model, head_of(2, 9), ["a", "b"], 32)


def test_loading_a_model_leaves_the_global_generator_alone(tmp_path):
    """Another thread may load one while a step of the learner has its own state in that generator."""
    directory = made_run(tmp_path / "run")
    before = torch.get_rng_state()
    directory.load_model()
    assert torch.equal(torch.get_rng_state(), before)
