"""The card of a model: what it learned from, how good it is and how that was measured, its limits, how to use it."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamclr.encoders.resnet import STEMS

if TYPE_CHECKING:
    from streamclr.models.pretrained import Pretrained

FINE_TUNED = ", fine-tuned"  # the end of the state of an encoder that was trained with its classifier
MAX_NAMED = 100  # class names on the card; config.json has them all


@dataclass(frozen=True)
class Card:
    """What is known about how a model was made; None: not known.

    >>> from streamclr import Card
    >>> card = Card(source="a camera", policy="contrast", steps=120)
    >>> card.steps, card.accuracy
    (120, None)
    """

    source: str | None = None  # the kind of stream, as in "a camera"
    policy: str | None = None
    buffer: int | None = None  # images in the buffer
    images: int | None = None  # of the stream that it has seen
    steps: int | None = None
    state: str | None = None  # of the encoder, as in "the encoder of step 80"
    accuracy: float | None = None  # 0 to 1
    measured: str | None = None  # how the accuracy was


FITTED = {  # how the frames became squares
    "crop": "It learned from the middle square of each frame.",
    "letterbox": "It learned from whole frames between black bars, which make them square: do the same with yours.",
    "stretch": "It learned from whole frames, each stretched to a square: do the same with yours.",
}


def card_text(model: "Pretrained") -> str:
    """Markdown with the front matter that the hub reads. Text is quoted as JSON, which YAML can read."""
    card, n = model.card, len(model.classes)
    names = json.dumps(model.classes, ensure_ascii=False) if n <= MAX_NAMED else "in config.json, id2label"
    known = {
        "stream": card.source,
        "images of it seen": None if card.images is None else f"{card.images:,}",
        "steps": None if card.steps is None else f"{card.steps:,}",
        "images in the buffer": None if card.buffer is None else f"{card.buffer:,}",
        "policy, which chose them": None if card.policy is None else f"`{card.policy}`",
        "state": card.state,
    }
    learned = "\n".join(f"| {name} | {'not known' if value is None else value} |" for name, value in known.items())
    together = "together with the encoder" if (card.state or "").endswith(FINE_TUNED) else "with the encoder frozen"
    measured = "Nobody has measured it."
    if card.accuracy is not None:
        measured = f"{100 * card.accuracy:.1f} % right: {card.measured or 'how it was measured is not known'}."
    return f"""---
library_name: streamclr
pipeline_tag: image-classification
tags:
- image-classification
- self-supervised-learning
- contrastive-learning
{"" if card.accuracy is None else _metrics(model, card.accuracy)}---

# A {model.architecture.encoder} that learned from {card.source or "a stream"}

An image classifier for {n} {"class" if n == 1 else "classes"}: {model.architecture}, for images of {model.size} px.
The encoder learned without labels, with StreamCLR. The classifier is a linear layer on its features, trained on labels
{together}.

```json
{names}
```

## What it learned from

| | |
|---|---|
{learned}

## How good it is

{measured}

## Limits

- It learned from one stream. How good it is on pictures from elsewhere is not known.
- It names one of its classes whatever it is shown: there is none for "something else".
- Its probabilities have not been calibrated: 0.9 need not be right nine times in ten.
- {FITTED[model.fit]} It takes squares of {model.size} px, and of any other picture the middle square.
- No licence has been chosen for it: whoever publishes it adds `license:` above.

## Use it

```python
from streamclr import from_pretrained

model = from_pretrained(".")  # this directory
probabilities, features = model(images)  # uint8, n x 3 x H x W, of any size
names = [model.classes[i] for i in probabilities.argmax(1)]
```

`streamclr run --init DIR` and `Learner(model.model)` go on learning with encoder and projection head.

{_elsewhere(model)}"""


def _metrics(model: "Pretrained", accuracy: float) -> str:
    card = model.card
    return f"""metrics:
- accuracy
model-index:
- name: streamclr-{model.architecture.encoder}
  results:
  - task:
      type: image-classification
    dataset:
      type: custom
      name: {json.dumps(card.source or "its stream")}
    metrics:
    - type: accuracy
      value: {json.dumps(round(accuracy, 4))}
      name: {json.dumps(f"accuracy ({card.measured or 'how is not known'})")}
"""


def _elsewhere(model: "Pretrained") -> str:
    encoder, width, stem, norm, _ = model.architecture
    if encoder == "compact":
        return """## Elsewhere

No other library has this encoder: `streamclr.compact(width)` makes it. The tensors have its names, and `projection.`
before those of the projection head.
"""
    if width not in (None, 64):
        return f"""## Elsewhere

The tensors have torchvision's names, and `projection.` before those of the projection head. torchvision's own
{encoder} does not take them: it has a width of 64, this one of {width}.
"""
    groups = ", norm_layer=lambda channels: torch.nn.GroupNorm(channels // 16, channels)" if norm == "group" else ""
    change, name, classifier = "", "name", ""
    if stem in ("small", "half"):
        kernel, stride = STEMS[stem]
        change = f"""net.conv1 = torch.nn.Conv2d(3, 64, {kernel}, {stride}, {kernel // 2}, bias=False)
net.maxpool = torch.nn.Identity()
"""
    if encoder == "mobilenet_v2":
        name, classifier = 'name.replace("fc.", "classifier.1.")', "; its classifier is the layer `fc` here"
    return f"""## In torchvision's definition

The tensors have torchvision's names, and `projection.` before those of the projection head{classifier}.

```python
import torch
import torchvision
from safetensors.torch import load_file

net = torchvision.models.{encoder}(num_classes={len(model.classes)}{groups})
{change}weights = load_file("model.safetensors")
net.load_state_dict({{{name}: t for name, t in weights.items() if not name.startswith("projection.")}})
net.eval()
mean, std = torch.tensor({model.mean}).view(3, 1, 1), torch.tensor({model.std}).view(3, 1, 1)
logits = net((images / 255 - mean) / std)  # n x 3 x {model.size} x {model.size}
```
"""
