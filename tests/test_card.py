"""The card says what is known, and the hub can read its front matter."""

import dataclasses
import re

import pytest

from streamclr import Card, Pretrained, resnet18
from streamclr.classifier import Head
from streamclr.encoders.projection import ContrastiveModel
from streamclr.models.card import card_text

yaml = pytest.importorskip("yaml")

CARD = Card(
    "a camera", "selective-bp?beta=1", 256, 12_800, 50, "the encoder of step 50", 0.81254, 'so: "16" test # images'
)


def text_of(card=CARD, classes=("a", "猫 ``` <b>\n---", "\udcff"), **options):
    model = ContrastiveModel(resnet18(**{"width": 2} | options))
    return card_text(Pretrained(model, Head(model.n_features, len(classes)), classes, 32, card))


def front_matter(text):
    return yaml.safe_load(re.match("---\n(.*?)\n---\n", text, re.DOTALL)[1])


def test_front_matter():
    found = front_matter(text_of())
    assert (found["library_name"], found["pipeline_tag"]) == ("streamclr", "image-classification")
    assert "image-classification" in found["tags"]
    assert found["metrics"] == ["accuracy"]
    (entry,) = found["model-index"]
    assert entry["name"] == "streamclr-resnet18"
    (result,) = entry["results"]
    assert result["task"] == {"type": "image-classification"}
    assert result["dataset"] == {"type": "custom", "name": "a camera"}
    (metric,) = result["metrics"]
    assert metric == {"type": "accuracy", "value": 0.8125, "name": 'accuracy (so: "16" test # images)'}


def test_what_is_known_is_said():
    text = text_of()
    for part in (
        "| stream | a camera |",
        "| images of it seen | 12,800 |",
        "| steps | 50 |",
        "| images in the buffer | 256 |",
        "`selective-bp?beta=1`",
        "the encoder of step 50",
        '81.3 % right: so: "16" test # images.',
        "a resnet18 of width 2 with the small stem and batch norm, for images of 32 px",
        '["a", "猫 ``` <b>\\n---", "',
    ):
        assert part in text


def test_what_is_not_known_is_not_made_up():
    text = text_of(Card())
    found = front_matter(text)
    assert "model-index" not in found
    assert "metrics" not in found
    assert "Nobody has measured it." in text
    assert text.count("| not known |") == len(dataclasses.fields(Card)) - 2  # but accuracy and how it was measured


def test_many_classes_are_not_all_named():
    text = text_of(classes=[f"class {i}" for i in range(101)])
    assert "class 7" not in text
    assert "in config.json" in text


def test_torchvision_only_where_it_fits():
    assert "torchvision.models" not in text_of()
    text = text_of(width=64, stem="half", norm="group")
    assert "net.conv1 = torch.nn.Conv2d(3, 64, 3, 2, 1, bias=False)" in text
    assert "GroupNorm(channels // 16, channels)" in text
    assert "net.conv1" not in text_of(width=64, stem="imagenet")
