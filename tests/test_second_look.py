"""The second look: float where int8 is in doubt, int8 everywhere else, in one file."""

import numpy as np
import pytest
import torch

from streamclr import resnet18
from streamclr.classifier import Classifier, Head
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from support.images import random_images

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from streamclr.models.formats.onnx_file import OUTPUTS, as_function, looked_again, make_onnx  # noqa: E402
from streamclr.models.formats.quantise import Calibration  # noqa: E402
from streamclr.models.formats.reader import session_of  # noqa: E402
from streamclr.models.formats.second_look import MAX_CHANGED, least_margin, look_again, margin, with_doubtful  # noqa: E402

ENCODERS = {"batch": lambda: resnet18(4), "group": lambda: resnet18(4, stem="imagenet", norm="group")}


@pytest.fixture(scope="module", params=ENCODERS)
def files(request):
    """Float and int8 of the same classifier."""
    torch.manual_seed(0)
    model = ContrastiveModel(ENCODERS[request.param]())
    for seed in range(3):
        model(random_images(16, 24, seed) / 255)
    head = Head(model.n_features, 5)
    head.fit_scale(infer(model, random_images(64, 24), model.features))
    torch.nn.init.normal_(head.linear.weight, std=0.3)
    classifier = Classifier(model, head, "abcde", 24)
    calibration = Calibration.of(random_images(32, 24), pure=True)
    return make_onnx(classifier, {}, None), make_onnx(classifier, {}, calibration)


def opened(file, outputs=OUTPUTS):
    return as_function(session_of(file, 1), outputs)


def with_second_look(files, least):
    exact, quantised = map(onnx.load_from_string, files)
    look_again(quantised, exact, least)
    onnx.checker.check_model(quantised, full_check=True)
    return quantised.SerializeToString()


@pytest.mark.system
def test_only_what_is_in_doubt_is_run_again(files):
    images = random_images(64, 40, seed=9)
    exact, int8 = (opened(file)(images) for file in files)
    least = float(margin(int8[0]).median())
    file = with_second_look(files, least)
    run = opened(file)
    doubtful = margin(int8[0]) < least
    assert 0 < doubtful.sum() < 64
    assert torch.equal(opened(with_doubtful(file), ("doubtful",))(images)[0], doubtful)
    assert looked_again(file, images) == pytest.approx(float(doubtful.double().mean()))
    found = run(images)
    for own, first, second in zip(found, int8, exact, strict=True):
        assert torch.equal(own[~doubtful], first[~doubtful])
        torch.testing.assert_close(own[doubtful], second[doubtful], atol=1e-5, rtol=1e-4)
        assert (first[doubtful] - second[doubtful]).abs().max() > 1e-4  # they do differ
    # One at a time, so that a batch has none in doubt or nothing else.
    for i, image in enumerate(images[:12].split(1)):
        torch.testing.assert_close(run(image)[0][0], found[0][i], atol=1e-5, rtol=1e-4)


@pytest.mark.system
@pytest.mark.parametrize(("least", "which"), [(1e-9, 1), (2.0, 0)])
def test_none_or_all_in_doubt(files, least, which):
    run, expected = opened(with_second_look(files, least)), opened(files[which])
    for n in (1, 2, 33):
        images = random_images(n, 24, n)
        for own, other in zip(run(images), expected(images), strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


@pytest.mark.system
def test_a_file_without_a_second_look_says_so(files):
    assert with_doubtful(files[1]) is None
    assert looked_again(files[0], random_images(2, 24)) is None


# ----------------------------------------------------------------------------------------------------------------------


def drawn(n, noise, seed, spread=1.0, n_classes=10):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, spread, (n, n_classes)))
    return logits.softmax(1), (logits + torch.from_numpy(rng.normal(0, noise, (n, n_classes)))).softmax(1)


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.3])
def test_the_margin_holds_for_other_images(noise):
    """Chosen on 512 images, it lets about as many changed classes pass on 100,000 others as it may, in the mean."""
    shares = []
    for seed in range(5):
        least = least_margin(*drawn(512, noise, seed))
        exact, found = drawn(100_000, noise, 99)
        sure = margin(found) >= least
        shares.append(float(((exact.argmax(1) != found.argmax(1)) & sure).double().mean()))
        assert 0 < float(sure.double().mean()) < 1
    assert MAX_CHANGED / 3 < sum(shares) / len(shares) < 1.5 * MAX_CHANGED
    assert max(shares) < 2.5 * MAX_CHANGED


def test_no_doubt_where_nothing_changes():
    exact, found = drawn(200, 1e-4, 0, spread=5.0)
    assert least_margin(exact, found) == 0
    assert least_margin(exact, exact) == 0
    one = torch.ones(8, 1)
    assert least_margin(one, one) == 0  # a single class


def test_probabilities_of_zero():
    exact = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.4, 0.6, 0.0], [0.6, 0.4, 0.0]])
    found = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.51, 0.49, 0.0], [0.49, 0.51, 0.0]])
    assert 0.02 <= least_margin(exact, found) <= 1
