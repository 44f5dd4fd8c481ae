"""Stage two on the labelled images of a source: heads, probes, learning curve, supervised baselines (Sec. IV-A)."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.progress import Progress, say
from streamclr.base.statistics import evenly_spaced
from streamclr.classifier import Accuracy, Head, checked_labels, draw_labelled, knn_probe, linear_probe, train_head
from streamclr.encoders.inference import checked_images, infer, seeded
from streamclr.encoders.projection import ContrastiveModel, model_of
from streamclr.linear import fit_linear
from streamclr.models.heads import Heads
from streamclr.records.directory import RunDirectory
from streamclr.records.plan import RunPlan
from streamclr.runs.assemble import public_model
from streamclr.scenes import SPREAD_WEIGHT
from streamclr.scenes import spread as spread_rows
from streamclr.stage_two import (
    KINDS,
    Chosen,
    ImagesByNumber,
    Unlabelled,
    check_classifier,
    choose_classifier,
    fine_tune,
    self_train,
)
from streamclr.streams.datasets.images import Images, Source, readable
from streamclr.streams.datasets.own import as_images, is_images
from streamclr.streams.frame import BadFrame
from streamclr.streams.stream import Stream
from streamclr.views import StrongViews

MakeEncoder = Callable[[], nn.Module]
Device = torch.device | str
MAX_LABELS_TUNED = 5000  # with more, a linear classifier is almost as good, in a fraction of the time
MAX_UNLABELLED = 20_000  # frames for self-training
MAX_PROBE_LABELS, MAX_PROBE_TESTED = 5000, 2000  # of one point of a learning curve
MAX_BYTES = 2**28  # of labelled images in memory; more are read again for every batch
_say_once = cache(say)


class Extracted(NamedTuple):
    """Features (n x d on the CPU), labels and numbers of those labelled images that could be read."""

    features: Tensor
    labels: Tensor
    numbers: Tensor
    weights: Tensor  # of the labels: 1, or less where one was spread from another frame of its track


def extract(model: ContrastiveModel, images: Images, numbers: Tensor | None = None) -> Extracted:
    """Features of labelled images: computed once, not augmented, the encoder frozen in eval mode."""
    numbers = torch.arange(len(images)) if numbers is None else numbers
    features, read = [], []
    bad: dict[int, BadFrame] = {}
    with Progress("features", len(numbers)) as bar:
        for chunk in numbers.split(1024):
            pixels, good, worse = readable(images, chunk.numpy())
            if len(good):
                features.append(infer(model, checked_images(pixels, "a labelled image"), model.features).cpu())
            read.append(good)
            bad |= worse
            bar.advance(len(chunk))
    report_unreadable(bad, len(numbers))
    kept = np.concatenate(read)
    labels = checked_labels(images.labels[kept], len(images.classes))
    return Extracted(torch.cat(features), labels, torch.from_numpy(kept), torch.ones(len(kept)))


def labelled(source: Source | Stream) -> tuple[Images, Images]:
    """The images for training and for the test, of a source that is known to have them."""
    assert source.train is not None
    assert source.test is not None
    return source.train, source.test


def report_unreadable(bad: dict[int, BadFrame], n: int) -> None:
    if not bad:
        return
    message = f"{len(bad)} of {n} labelled images cannot be read; {next(iter(bad.values()))}"
    if len(bad) == n:
        raise UserError(message)
    _say_once(f"left out: {message}")


# Accuracies. known: what a head or probe learns from; tested: what it is tested on.


def head_accuracy(head: Head, tested: Extracted) -> Accuracy:
    return Accuracy.of(head(tested.features).argmax(1), tested.labels, head.linear.out_features)


def probe_accuracy(known: Extracted, tested: Extracted, n_classes: int) -> float:
    """Of the linear probe."""
    return head_accuracy(linear_probe(known.features, known.labels, n_classes), tested).top1


def knn_accuracy(known: Extracted, tested: Extracted, n_classes: int) -> float:
    predicted = knn_probe(known.features, known.labels, tested.features, n_classes)
    return Accuracy.of(predicted, tested.labels, n_classes).top1


def probes(known: Extracted, tested: Extracted, n_classes: int) -> dict[str, float]:
    """Both probes, by their names in results.json."""
    return {"linear_probe": probe_accuracy(known, tested, n_classes), "knn": knn_accuracy(known, tested, n_classes)}


def curve_point(model: ContrastiveModel, train: Images, test: Images) -> float:
    """One point of a learning curve: kNN accuracy on some labelled and test images, evenly spaced."""
    most = ((train, MAX_PROBE_LABELS), (test, MAX_PROBE_TESTED))
    numbers = [torch.from_numpy(evenly_spaced(len(images), n)) for images, n in most]
    known, tested = extract(model, train, numbers[0]), extract(model, test, numbers[1])
    return knn_accuracy(known, tested, len(train.classes))


def train_supervised(
    encoder: MakeEncoder, images: Images, numbers: Tensor, epochs: int = 100, seed: int = 0, device: Device = "cpu"
) -> tuple[ContrastiveModel, Head]:
    """The supervised baseline, first reading: a new encoder and a linear layer, trained end to end on the labels alone.

    The views are flips and crops of at least half of the image. The second reading is `train_head` on the features of
    an untrained encoder.
    """
    with seeded(seed):
        model = ContrastiveModel(encoder()).to(device)
    head = Head(model.n_features, len(images.classes)).to(device)
    optimizer = torch.optim.Adam([*model.encoder.parameters(), *head.parameters()], lr=1e-3, weight_decay=1e-4)
    views = StrongViews(scale=(0.5, 1.0), jitter=0, grey=0, blur=0)
    generator = torch.Generator(device).manual_seed(seed)
    read, good, bad = readable(images, numbers.numpy())
    report_unreadable(bad, len(numbers))
    pixels = checked_images(read, "a labelled image").to(device)
    labels = checked_labels(images.labels[good], len(images.classes)).to(device)
    with Progress(f"supervised on {len(numbers):,} labels, epochs", epochs) as bar:
        for _ in range(epochs):
            for batch in torch.randperm(len(pixels), generator=generator, device=device).split(128):
                logits = head(model.features(views(pixels[batch], generator)))
                optimizer.zero_grad()
                F.cross_entropy(logits, labels[batch]).backward()
                optimizer.step()
            bar.advance(1)
    return model, head.cpu().eval().requires_grad_(False)


def train_classifier(
    classifier: str,
    model: ContrastiveModel,
    train: Images,
    known: Extracted,
    public: ContrastiveModel | None,
    unlabelled: Unlabelled | None,
    seed: int,
) -> Chosen:
    """A classifier from labelled images whose features are known, and perhaps other frames of the same stream."""
    features, labels, numbers, weights = known
    n_classes, tracks = len(train.classes), train.tracks
    groups = None if tracks is None else torch.from_numpy(tracks)[numbers]
    if classifier == "paper":
        return Chosen("paper", train_head(features, labels, n_classes, seed=seed), "paper: as asked")
    n_given = int((weights == 1).sum())
    is_for_linear = n_given > MAX_LABELS_TUNED and classifier == "auto"
    if classifier == "linear" or is_for_linear:
        why = (
            f"{n_given:,} labels, and auto fine-tunes on {MAX_LABELS_TUNED:,} at most" if is_for_linear else "as asked"
        )
        return Chosen("linear", fit_linear(features, labels, n_classes, weights, groups), f"linear: {why}")
    images = _images_of(train, numbers)
    if classifier == "auto":
        return choose_classifier(
            model, images, labels, n_classes, weights, groups, public,
            features=features, unlabelled=unlabelled, seed=seed,
        )  # fmt: skip
    if classifier == "selftrained" and unlabelled is None:
        raise UserError("selftrained needs tracks without a label, and all have one: use finetuned")
    own, head = fine_tune(model, images, labels, n_classes, weights, seed=seed)
    if unlabelled is not None and classifier == "selftrained":
        own, head = self_train(model, (own, head), images, labels, unlabelled, weights, seed=seed)
    return Chosen(classifier, head, f"{KINDS[classifier]}: as asked", own)


def spread_over_tracks(known: Extracted, drawn: Tensor, tracks: Tensor) -> Extracted:
    """The drawn images and the other frames of their tracks, each with the label of the nearest drawn one.

    known: all images; tracks: of each of them.
    """
    rows, sources = spread_rows(drawn.nonzero()[:, 0], tracks, reach=len(tracks))
    weights = torch.where(rows == sources, 1.0, SPREAD_WEIGHT)
    return Extracted(known.features[rows], known.labels[sources], known.numbers[rows], weights)


def other_frames(train: Images, known: Extracted, own: Extracted, tracks: Tensor) -> Unlabelled | None:
    """The frames of tracks without a label; None if there are none.

    known: all images that can be read; own: those with labels; tracks: of all.
    """
    others = (~torch.isin(tracks, tracks[torch.isin(known.numbers, own.numbers)])).nonzero()[:, 0]
    others = others[evenly_spaced(len(others), MAX_UNLABELLED)]
    numbers = known.numbers[others].numpy()
    return Unlabelled(lambda rows: train.images(numbers[rows]), tracks[others]) if len(numbers) else None


def _images_of(images: Images, numbers: Tensor) -> Tensor | ImagesByNumber:
    """In memory if they fit."""
    known = numbers.numpy()
    if len(known) * images.images(known[:1]).nbytes > MAX_BYTES:
        return lambda rows: images.images(known[rows])
    return torch.from_numpy(images.images(known))


def evaluate(
    model: Any,
    train: Any,
    test: Any,
    fractions: Sequence[float] = (0.01, 0.1, 1.0),
    seed: int = 0,
    classifier: str = "auto",
    public: ContrastiveModel | None = None,
    spread: bool = True,
) -> tuple[dict[str, Any], dict[float, Chosen]]:
    """Stage two: a classifier for each label fraction, and both probes on all labels.

    model: a Learner, its model or its extractor().
    train, test: labelled images, as those of a stream, or a pair of images and labels (see `as_images`).
    classifier: one of CLASSIFIERS.
    public: the encoder before it learned from the stream: `auto` takes it where the labels say that it is better.
    spread: let a label count for the other frames of its track, and learn from other tracks, where tracks are known.

    Returns what results.json says of them, and the classifiers.

    >>> import torch
    >>> from streamclr import Learner, evaluate, resnet18
    >>> images = torch.randint(256, (40, 3, 16, 16), dtype=torch.uint8)
    >>> labels = torch.arange(40) % 2
    >>> images[labels == 1] //= 4  # the second class is dark
    >>> learner = Learner(resnet18(width=4), buffer=8)
    >>> train, test = (images[:20], labels[:20]), (images[20:], labels[20:])
    >>> results, classifiers = evaluate(learner, train, test, fractions=(0.5, 1.0), classifier="linear")
    >>> list(results["labels"]), 0 <= results["labels"]["0.5"]["accuracy"] <= 1
    (['0.5', '1.0'], True)
    """
    model, train = model_of(model), _labelled_images("train", train)
    test = _labelled_images("test", test, train.classes)
    if tuple(train.classes) != tuple(test.classes):
        raise UserError(f"train has the classes {_some(train.classes)}, test {_some(test.classes)}: give the same")
    check_classifier(classifier)
    n_classes = len(train.classes)
    draws = {fraction: draw_labelled(train.labels, fraction, train.classes, seed) for fraction in fractions}
    known, tested = extract(model, train), extract(model, test)
    chosen: dict[float, Chosen] = {}
    labels: dict[str, Any] = {}
    for fraction, numbers in draws.items():
        drawn = torch.isin(known.numbers, numbers)
        if not drawn.any():
            raise UserError(f"none of the {len(numbers)} images of {fraction:.2%} labels can be read: use more labels")
        own, unlabelled = Extracted(*(column[drawn] for column in known)), None
        if spread and train.tracks is not None and classifier != "paper":
            tracks = torch.from_numpy(train.tracks)[known.numbers]
            own = spread_over_tracks(known, drawn, tracks)
            unlabelled = other_frames(train, known, own, tracks)
        one = chosen[fraction] = train_classifier(classifier, model, train, own, public, unlabelled, seed)
        accuracy = head_accuracy(one.head, tested if one.model is None else extract(one.model, test))
        labels[str(fraction)] = {
            "n_labels": int(drawn.sum()),
            **({"n_spread": n_spread} if (n_spread := len(own.labels) - int(drawn.sum())) else {}),
            "classifier": one.kind,
            "why": one.why,
            **({"public_encoder": True} if one.is_public else {}),
            "accuracy": accuracy.top1,
            "per_class": dict(zip(train.classes, accuracy.per_class, strict=True)),
        }
    return {"n_test": len(tested.labels), "labels": labels, **probes(known, tested, n_classes)}, chosen


def _labelled_images(name: str, data: Any, classes: Sequence[str] | None = None) -> Images:
    """classes: of images that do not say."""
    images = as_images(data, classes=None if is_images(data) or hasattr(data, "classes") else classes)
    if not images.classes or not len(images):
        raise UserError(f"{name} has no labels or no images: give labelled images, or (images, labels)")
    return images


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" … ({len(names)})" if len(names) > 4 else "")


def evaluate_supervised(
    encoder: MakeEncoder, train: Images, test: Images, fractions: Sequence[float], seed: int = 0, device: Device = "cpu"
) -> dict[str, dict[str, float]]:
    """Both readings of the supervised baseline, on the same draws of labels."""
    n_classes = len(train.classes)
    with seeded(seed):
        untrained = ContrastiveModel(encoder()).to(device)
    untrained_tested = extract(untrained, test)
    results = {}
    for fraction in fractions:
        numbers = draw_labelled(train.labels, fraction, train.classes, seed)
        model, head = train_supervised(encoder, train, numbers, seed=seed, device=device)
        features, labels, *_ = extract(untrained, train, numbers)
        frozen = train_head(features, labels, n_classes, seed=seed)
        heads = {"end_to_end": (head, extract(model, test)), "untrained_encoder": (frozen, untrained_tested)}
        results[str(fraction)] = {reading: head_accuracy(one, tested).top1 for reading, (one, tested) in heads.items()}
    return results


def evaluate_run(plan: RunPlan, model: ContrastiveModel, stream: Stream, directory: RunDirectory) -> dict[str, Any]:
    """Stage two on the run's own labels; no results for a stream that has none."""
    train, test = stream.train, stream.test
    if train is None or test is None:
        return {"labels": {}}
    public = public_model(plan) if plan.classifier == "auto" else None
    results, chosen = evaluate(
        model, train, test, plan.label_fractions, plan.seed, plan.classifier, public, plan.spread == "on"
    )
    heads, models = ({f: getattr(one, part) for f, one in chosen.items()} for part in ("head", "model"))
    Heads(directory).save_fractions(heads, train.classes, models)
    if plan.supervised:
        encoder, device = plan.architecture.make, model.mean.device
        results["supervised"] = evaluate_supervised(encoder, train, test, plan.label_fractions, plan.seed, device)
    return results
