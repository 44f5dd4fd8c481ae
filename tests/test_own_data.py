"""Arrays, torch Datasets, generators and Sources of a program as streams, and stage two from Python."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from streamclr import (
    ArrayImages,
    Learner,
    RandomReplace,
    Source,
    UserError,
    choose_classifier,
    evaluate,
    features_of,
    fit_linear,
    knn_probe,
    linear_probe,
    open_stream,
    resnet18,
    train_head,
)
from streamclr.streams.frame import BadFrame
from support.images import make_folder, random_images

N, SIZE = 40, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("own") / "images", N // 2, SIZE)


@pytest.fixture(scope="module")
def images(folder):
    return open_stream(f"folder:{folder}").read(N)


LABELS = torch.arange(N) // (N // 2)


class Items(Dataset):
    """As torchvision's: pairs of a picture and a label, the labels in `targets`."""

    classes = ("ant", "bee")

    def __init__(self, images, form):
        self.images, self.form, self.targets = images, form, LABELS.tolist()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return FORMS[self.form](self.images[number]), self.targets[number]


FORMS = {
    "pillow": lambda image: Image.fromarray(image.permute(1, 2, 0).numpy()),
    "tensor": lambda image: image,
    "array": lambda image: image.numpy(),
    "channels last": lambda image: image.permute(1, 2, 0).numpy(),
}
OWN = {
    "tensor": lambda images: images,
    "array": lambda images: images.numpy(),
    "channels last": lambda images: images.permute(0, 2, 3, 1).numpy(),
    "list": list,
    "generator": lambda images: (image for image in images),
    "generator of pairs": lambda images: zip(images, LABELS.tolist(), strict=True),
    **{f"dataset, {form}": lambda images, form=form: Items(images, form) for form in FORMS},
}


def learned(stream, **options):
    torch.manual_seed(0)
    learner = Learner(resnet18(4), RandomReplace(), 8, lr=1e-3, device="cpu", **options)
    for segment in stream.segments(8):
        learner.learn_many(segment)
    return learner


@pytest.mark.parametrize("positives", ["views", "time"])
def test_the_same_images_from_anywhere_give_the_same_weights_bit_for_bit(folder, images, positives):
    expected = learned(open_stream(f"folder:{folder}"), positives=positives)
    assert expected.n_steps == N / 8
    for name, make in OWN.items():
        found = learned(open_stream(make(images)), positives=positives)
        for key, value in expected.model.state_dict().items():
            assert torch.equal(value, found.model.state_dict()[key]), (name, key)


@pytest.mark.parametrize("options", [{"stc": 5}, {"order": "iid"}, {"passes": 2}])
def test_in_the_orders_of_a_folder_too(folder, images, options):
    expected = open_stream(f"folder:{folder}", seed=3, **options)
    for data, labels in ((images, {"labels": LABELS}), (Items(images, "pillow"), {})):
        own = open_stream(data, **labels, seed=3, **options)
        assert own.classes == (("ant", "bee") if not labels else ("0", "1"))
        assert torch.equal(own.read(2 * N), expected.read(2 * N))
        assert torch.equal(own.labels(torch.arange(N)), expected.labels(torch.arange(N)))
        expected = open_stream(f"folder:{folder}", seed=3, **options)


def test_tracks(images):
    tracks = torch.arange(N) // 5
    stream = open_stream(images, labels=LABELS, tracks=tracks, order="tracks")
    assert len(stream.tracks(torch.arange(20)).unique()) == 4
    frames = open_stream((image, None, track) for image, track in zip(images, tracks.tolist(), strict=True))
    list(frames.segments(8))
    assert torch.equal(frames.tracks(torch.arange(N)), tracks)
    assert open_stream(images).tracks(torch.arange(3)) is None
    assert open_stream(iter(images)).tracks(torch.arange(0)) is None


def test_images_of_other_sizes_are_scaled_as_those_of_a_folder(folder, images):
    expected = open_stream(f"folder:{folder}", size=24).read(N)
    for data in (Items(images, "pillow"), list(images), iter(images)):
        (found,) = open_stream(data, size=24).segments(N)
        assert torch.equal(found, expected)
    assert open_stream(images, size=24).read(N).shape == expected.shape
    mixed = [images[0], random_images(1, 24)[0]]
    with pytest.raises(UserError, match=r"several sizes \(16 x 16, 24 x 24\): give size="):
        open_stream(mixed).read(2)


@pytest.mark.parametrize("make", [OWN["array"], OWN["dataset, pillow"], list], ids=["array", "dataset", "list"])
def test_a_stream_of_stored_images_resumes(images, make):
    whole, stopped = (open_stream(make(images), stc=None, passes=2) for _ in range(2))
    assert torch.equal(whole.read(24), stopped.read(24))
    other = open_stream(make(images), passes=2)
    other.load_state_dict(stopped.state_dict())
    assert torch.equal(whole.read(24), other.read(24))


class Again:
    """An iterable that can begin anew, and is no sequence."""

    def __init__(self, images):
        self.images = images

    def __iter__(self):
        return zip(self.images, LABELS.tolist(), strict=True)


def segments(stream, n=6):
    return list(stream.segments(n))


def test_frames_that_can_be_read_again_resume_where_they_were(images):
    stream, other = open_stream(Again(images)), open_stream(Again(images))
    assert stream.repeats
    ahead = stream.segments(6)
    first = [next(ahead) for _ in range(3)]
    assert torch.equal(torch.cat(first), images[:18])
    state = copy.deepcopy(stream.state_dict())
    assert other.size == SIZE  # a look at the first frame takes none away
    other.load_state_dict(state)
    assert other.position == other.account.learned == 18
    assert torch.equal(torch.cat(segments(other)), images[18:])
    assert torch.equal(other.labels(torch.arange(N)), LABELS)  # of those before, too: the buffer has some


def test_a_generator_goes_on_with_what_comes(images):
    stream = open_stream(iter(images))
    assert not stream.repeats
    list(stream.segments(6, until=12))
    other = open_stream(iter(images[20:]))
    other.load_state_dict(stream.state_dict())
    assert other.position == 12
    assert torch.equal(torch.cat(segments(other)), images[20:])
    assert other.position == 32
    assert other.labels(torch.tensor([0, 31])).tolist() == [-1, -1]


def test_labels_and_tracks_of_frames_take_memory_where_they_change(images):
    """A camera's track of a million frames is one entry, not a million."""
    marks = [(None, None)] * 5 + [(1, 7)] * 900 + [(1, 8)] * 50 + [(0, None)] * 40 + [(None, None)] * 5

    def frames():
        return ((images[i % N], *mark) for i, mark in enumerate(marks))

    stream, other = open_stream(frames(), classes=("ant", "bee")), open_stream(frames(), classes=("ant", "bee"))
    list(stream.segments(64))
    every = torch.arange(len(marks))
    assert stream.labels(every).tolist() == [-1 if label is None else label for label, _ in marks]
    assert stream.tracks(every).tolist() == [-1 if track is None else track for _, track in marks]
    assert stream.state_dict()["marks"].shape == (3, 4)
    assert other.size == SIZE  # a look at a frame without a label, which comes next
    other.load_state_dict(stream.state_dict())
    assert torch.equal(other.labels(every), stream.labels(every))
    next(other.segments(1))
    assert other.labels(torch.tensor([0, 5, 999, 1000])).tolist() == [-1, 1, -1, -1]


def test_a_look_at_the_size_takes_no_frame_away(images):
    stream = open_stream(image for image in images)
    assert stream.size == stream.size == SIZE
    assert torch.equal(torch.cat(segments(stream)), images)
    assert open_stream(iter(images)).position == 0


def test_segments_end_where_they_should(images):
    stream = open_stream(iter(images))
    assert [len(one) for one in stream.segments(16, until=20)] == [16, 4]
    assert [len(one) for one in stream.segments(16)] == [16, 4]
    assert segments(stream) == []
    arrived = []
    list(
        open_stream(iter(images)).segments(16, arrived=lambda *all: arrived.append((len(all[0]), all[1], len(all[2]))))
    )
    assert arrived == [(16, "frames", 16), (16, "frames", 16), (8, "frames", 8)]


class Numbers(Source):
    """A researcher's own: grey images of rising brightness, without an end."""

    def images(self, numbers):
        return np.repeat(numbers % 256, 3 * 8 * 8).reshape(-1, 3, 8, 8).astype(np.uint8)

    def labels(self, numbers):
        return numbers % 2


def test_a_source_of_ones_own():
    stream = open_stream(Numbers())
    assert stream.read(3)[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert stream.labels(torch.arange(3)).tolist() == [0, 1, 0]
    assert math.isfinite(learned_once(stream).loss)


class ManyBad(Numbers):
    """Of a dataset with images that cannot be read: every one of the first ten, then every third."""

    def images(self, numbers):
        if ((numbers < 10) | (numbers % 3 == 0)).any():
            raise BadFrame("an image", "damaged", "a test")
        return super().images(numbers)


def test_of_images_that_cannot_be_read_labels_and_numbers_are_kept_apart():
    stream, other = (open_stream(ManyBad()) for _ in range(2))
    images = stream.read(2000)
    good = [number for number in range(10, 3100) if number % 3][:2000]
    assert images[:, 0, 0, 0].tolist() == [number % 256 for number in good]
    arrivals = torch.tensor([0, 1999, 3, 4, 1000])
    assert stream.labels(arrivals).tolist() == [good[n] % 2 for n in arrivals.tolist()]
    state = json.loads(json.dumps(stream.state_dict()))
    assert state["skipped"] == sorted(set(range(stream.position)) - set(good))
    other.load_state_dict(state)
    for one in (stream, other):
        assert one.read(1)[0, 0, 0, 0] == (good[-1] + 2) % 256
        assert one.labels(torch.tensor([2000, 7])).tolist() == [(good[-1] + 2) % 2, good[7] % 2]


def learned_once(stream):
    return Learner(resnet18(4), RandomReplace(), 8, device="cpu").learn_many(next(stream.segments(8)))


@pytest.mark.parametrize(
    ("data", "options", "told"),
    [
        (lambda x: x.float(), {}, r"the images are 40 x 3 x 16 x 16 of float32: give n x 3 x H x W of uint8"),
        (lambda x: x[:, :2], {}, "40 x 2 x 16 x 16 of uint8"),
        (lambda x: x[0], {}, "3 x 16 x 16 of uint8"),
        (lambda x: x[:0], {}, "there are no images"),
        (
            lambda x: list(x.float()),
            {},
            r"image 0 is float32 of shape \(3, 16, 16\): give uint8.*leave out a transform",
        ),
        (lambda x: ["a.png"], {}, "image 0 is "),
        (lambda x: (image / 255 for image in x), {}, "frame 0 is float32"),
        (lambda x: x, {"labels": LABELS[:3]}, "there are 40 images and 3 labels"),
        (lambda x: x, {"labels": LABELS / 2}, r"the labels are float32 of shape \(40,\): give one whole number"),
        (lambda x: x, {"labels": LABELS, "classes": ["one"]}, "the labels are 0 to 1, and there are 1 classes"),
        (lambda x: x, {"tracks": LABELS[:3]}, "there are 40 images and 3 tracks"),
        (lambda x: list(x), {"labels": LABELS[:3]}, "there are 40 images and 3 labels"),
        (lambda x: x, {"label": LABELS}, "a stream of images has no option 'label': did you mean 'labels'"),
        (lambda x: iter(x), {"labels": LABELS}, "a stream of frames has no option 'labels': .*use classes, size"),
        (lambda x: x, {"stc": 5}, "stc=5 needs classes"),
        (lambda x: {"a": 1}, {}, "a dict is no source: give one such as 'clip.mp4'"),
        (lambda x: 3, {}, "a int is no source|an int is no source"),
        (lambda x: ArrayImages(x.numpy(), LABELS.numpy(), "ab"), {"labels": LABELS}, "labels is given"),
        (lambda x: iter([]), {}, "there are no frames"),
    ],
)
def test_what_cannot_be_a_stream(images, data, options, told):
    def read():
        stream = open_stream(data(images), **options)
        assert stream.size
        segments(stream)

    with pytest.raises(UserError, match=told):
        read()


# ----------------------------------------------------------------------------------------------------------------------
# Stage two.


@pytest.fixture(scope="module")
def learner():
    torch.manual_seed(0)
    return Learner(resnet18(4), RandomReplace(), 8, device="cpu")


def test_features_of_a_learner_its_model_and_its_extractor_are_the_same(learner, images):
    expected = learner.extractor()(images)
    for model in (learner, learner.model, learner.extractor()):
        assert torch.equal(features_of(model, images), expected)
    assert torch.equal(features_of(learner, images.numpy()), expected)
    assert torch.equal(features_of(learner, lambda rows: images[rows], N), expected)


def test_classifiers_and_probes_from_arrays(learner, images):
    features = features_of(learner, images)
    for train in (train_head, linear_probe, fit_linear):
        head = train(features, LABELS, 2)
        assert float((head(features).argmax(1) == LABELS).float().mean()) > 0.8
    assert knn_probe(features, LABELS, features, 2, k=1).tolist() == LABELS.tolist()
    assert choose_classifier(learner, images, LABELS, 2, kinds=["linear"]).kind == "linear"


def test_evaluate_takes_images_and_labels(learner, images):
    train, test = (images[::2], LABELS[::2]), (images[1::2], LABELS[1::2].numpy())
    results, chosen = evaluate(learner, train, test, fractions=(0.5, 1.0), classifier="linear")
    assert list(results["labels"]) == ["0.5", "1.0"]
    assert results["n_test"] == N / 2
    assert 0 <= results["knn"] <= 1
    assert chosen[1.0].kind == "linear"
    named = [ArrayImages(part.numpy(), np.asarray(labels), ("ant", "bee")) for part, labels in (train, test)]
    again, _ = evaluate(learner.model, *named, fractions=(0.5, 1.0), classifier="linear")
    assert again["knn"] == results["knn"]
    assert list(again["labels"]["1.0"]["per_class"]) == ["ant", "bee"]
    stream = open_stream(*train[:1], labels=train[1], classes=["ant", "bee"])
    assert evaluate(learner, stream.train, named[1], (1.0,), classifier="linear")[0]["knn"] == results["knn"]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda one, x: features_of(one, x.float()), "the batch is torch.float32: give torch.uint8"),
        (lambda one, x: features_of(7, x), "a int is no model: give a Learner"),
        (lambda one, x: features_of(one, lambda rows: x[rows]), "n is missing"),
        (lambda one, x: train_head(x, LABELS, 2), r"the features are torch.uint8 of shape \(40, 3, .*: give floats"),
        (lambda one, x: linear_probe(torch.rand(40, 4), LABELS / 2, 2), "the labels are torch.float32"),
        (lambda one, x: linear_probe(torch.rand(39, 4), LABELS, 2), "40 labels for 39 images"),
        (lambda one, x: fit_linear(torch.rand(40), LABELS, 2), r"of shape \(40,\): give floats, n x d"),
        (lambda one, x: knn_probe(torch.rand(40, 4), LABELS, torch.rand(3, 5), 2), "there are 5 features, and 4 are"),
        (lambda one, x: knn_probe(torch.rand(40, 4), LABELS, torch.rand(3, 4), 1), "the labels are 0 to 1: use 0 to 0"),
        (lambda one, x: knn_probe(torch.rand(40, 4), LABELS, torch.rand(3, 4), 2, k=0), "k is 0"),
        (lambda one, x: evaluate(one, x, (x, LABELS)), "train has no labels"),
        (lambda one, x: evaluate(one, (x, LABELS), (x, LABELS + 1)), "the labels are 1 to 2, and there are 2 classes"),
        (
            lambda one, x: evaluate(one, (x, LABELS), ArrayImages(x.numpy(), LABELS.numpy(), ("ant", "bee"))),
            "train has the classes 0, 1, test ant, bee: give the same",
        ),
    ],
)
def test_what_stage_two_refuses(learner, images, ask, told):
    with pytest.raises(UserError, match=told):
        ask(learner, images)
