"""What each method of another paper promises beyond the contracts of policies, losses and optimizers."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from streamclr import CLA, SCALE, Learner, MinRed, RandomReplace, UserError, nt_xent, resnet18
from streamclr.buffer import Buffer
from streamclr.compute.adam import Adam
from streamclr.encoders.inference import infer
from streamclr.peers.min_red import least_redundant
from streamclr.peers.orthogonal import BETA, OrthogonalAdam
from streamclr.peers.scale import part_and_select
from streamclr.recipe import build_loss
from support.images import random_images


def draw(*shape, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


# ----------------------------------------------------------------------------------------------------------------------
# MinRed


def naive_least_redundant(features, size, arrivals):
    left = list(range(len(features)))
    while len(left) > size:
        _, one, other = max((float(features[i] @ features[j]), i, j) for i in left for j in left if i < j)
        left.remove(one if arrivals[one] < arrivals[other] else other)
    return left


@settings(max_examples=25)
@given(n=st.integers(2, 14), seed=st.integers(0, 9), data=st.data())
def test_least_redundant_agrees_with_a_naive_reference(n, seed, data):
    generator = torch.Generator().manual_seed(seed)
    features = nn.functional.normalize(torch.randn(n, 3, generator=generator, dtype=torch.float64), dim=1)
    arrivals, size = torch.randperm(n, generator=generator), data.draw(st.integers(1, n))
    assert least_redundant(features, size, arrivals).tolist() == naive_least_redundant(features, size, arrivals)


def test_min_red_keeps_one_of_each_kind_of_image(model):
    """Runs of nearly equal images, as a camera at rest gives them: of each run the newest stays."""
    policy, buffer, kinds = MinRed(), Buffer(4), random_images(4)
    for first in range(0, 32, 8):
        noise = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1) % 2
        segment = (kinds[first // 8].clamp(max=250) + noise).expand(8, -1, -1, -1).contiguous()
        pool = buffer.pool(segment)
        buffer.replace(pool, policy.keep(pool, min(4, len(pool)), model))
    assert sorted(arrival // 8 for arrival in buffer.arrivals.tolist()) == [0, 1, 2, 3]


def test_min_red_computes_the_features_of_an_image_once(model, monkeypatch):
    n_images = []
    monkeypatch.setattr("streamclr.peers.min_red.infer", lambda m, x, *f: n_images.append(len(x)) or infer(m, x, *f))
    policy, buffer = MinRed(), Buffer(6)
    for seed, n in enumerate((8, 5, 3)):
        pool = buffer.pool(random_images(n, seed=seed))
        buffer.replace(pool, policy.keep(pool, 6, model))
    assert n_images == [8, 5, 3]


# ----------------------------------------------------------------------------------------------------------------------
# SCALE


def naive_part_and_select(features, size):
    """Boxes as lists of rows, the longest side found by looking at all of them."""
    boxes = [list(range(len(features)))]
    while len(boxes) < size:
        sides = [features[box].amax(0) - features[box].amin(0) for box in boxes]
        longest = max(range(len(boxes)), key=lambda i: float(sides[i].max()))
        if not sides[longest].any():
            break
        box, axis = boxes.pop(longest), int(sides[longest].argmax())
        middle = (features[box].amax(0) + features[box].amin(0))[axis] / 2
        boxes += [[row for row in box if features[row, axis] <= middle], [r for r in box if features[r, axis] > middle]]
    chosen = set()
    for box in boxes:
        middle = (features[box].amax(0) + features[box].amin(0)) / 2
        chosen.add(min(box, key=lambda row: float((features[row] - middle).square().sum())))
    rest = [row for row in range(len(features)) if row not in chosen]
    return chosen | set(rest[len(rest) - (size - len(chosen)) :])


@settings(max_examples=40)
@given(n=st.integers(1, 40), d=st.integers(1, 6), seed=st.integers(0, 50), equal=st.booleans(), data=st.data())
def test_part_and_select_agrees_with_a_naive_reference(n, d, seed, equal, data):
    features = draw(n, d, seed=seed, dtype=torch.float64)
    if equal:  # many rows are the same
        features = features[torch.randint(max(1, n // 4), (n,), generator=torch.Generator().manual_seed(seed))]
    size = data.draw(st.integers(1, n))
    chosen = part_and_select(features, size).tolist()
    assert len(chosen) == size
    assert set(chosen) == naive_part_and_select(features, size)


def test_rows_that_float_can_hardly_tell_apart_are_cut_apart():
    near = torch.tensor([1.0, math.nextafter(1.0, 2.0)], dtype=torch.float64)[:, None]
    assert sorted(part_and_select(torch.cat([near, near + 1e-300, torch.zeros(1, 1)]), 3).tolist()) == [0, 1, 4]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_leave_the_refusal_to_the_step(value):
    features = draw(12, 3)
    features[5, 1] = value
    assert len(set(part_and_select(features, 7).tolist())) == 7


def test_what_is_rare_is_kept():
    """A hundred images in one place and ten far apart: a uniform draw of 20 has two of the ten, an even one all."""
    features = torch.cat([0.01 * draw(100, 4), 10 * draw(10, 4, seed=1)])
    assert set(range(100, 110)) <= set(part_and_select(features, 20).tolist())


def test_scale_spreads_over_the_features_of_the_encoder_as_it_is_now(model):
    pool = Buffer(6).pool(random_images(18))
    pool.images[:9] = pool.images[0]  # half of them are one picture
    features = infer(model, pool.images, model.features)
    keep = SCALE().keep(pool, 6, model)
    assert set(keep.tolist()) == naive_part_and_select(features, 6)
    assert (keep < 9).sum() <= 1


# ----------------------------------------------------------------------------------------------------------------------
# CLA


def begun(loss, seed=0):
    torch.manual_seed(seed)
    model = Learner(resnet18(4), buffer=8, device="cpu").model
    loss.begin(model)
    return loss


def test_cla_is_nt_xent_and_the_distance_to_the_same_view_of_the_past():
    loss = begun(CLA(weight=0.3, temperature=0.2))
    z0, z1, t0, t1 = (nn.functional.normalize(draw(6, 128, seed=seed), dim=1) for seed in range(4))
    predicted = loss.aligner(torch.cat([z0, z1]))
    cosines = nn.functional.cosine_similarity(predicted, torch.cat([t0, t1]), dim=1)
    expected = nt_xent(z0, z1, 0.2) + 0.3 * sum(1 - cosine.item() for cosine in cosines) / 12
    assert loss(z0, z1, t0, t1).item() == pytest.approx(expected.item(), rel=1e-5)


def test_without_weight_it_learns_as_nt_xent_does():
    """From the same weights, and with the same views: the network of the loss takes nothing from their draw."""

    def learned(loss):
        torch.manual_seed(0)
        learner = Learner(resnet18(4), RandomReplace(), 8, loss=loss, temperature=0.2, seed=3, device="cpu")
        return [learner.learn_many(random_images(8, seed=seed)).loss for seed in range(4)]

    assert learned("cla?weight=0") == learned("nt-xent")
    assert learned("cla") != learned("nt-xent")


def test_the_aligner_learns_to_predict_the_past_while_the_past_stays():
    learner = Learner(resnet18(4), RandomReplace(), 8, loss="cla?weight=100&momentum=0.9999", lr=1e-2, device="cpu")
    before = copy.deepcopy(learner.loss.target.state_dict())
    losses = [learner.learn_many(random_images(8, seed=seed % 2)).loss for seed in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    for name, tensor in learner.loss.target.state_dict().items():
        assert torch.allclose(tensor.float(), before[name].float(), atol=0.02) or "num_batches" in name


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ("cla?weight=-1", "weight is -1.0: use 0"),
        ("cla?weight=nan", "weight is nan: use 0"),
        ("cla?width=0", "width is 0: use at least 1"),
        ("cla?momentum=1", "momentum is 1.0: use 0"),
    ],
)
def test_what_cannot_be_an_alignment(loss, told):
    with pytest.raises(UserError, match=told):
        build_loss(loss)


# ----------------------------------------------------------------------------------------------------------------------
# Orthogonal gradients


def gradients(n, seed=0):
    """Like those of consecutive frames: a common part, and a new one in each step."""
    common = draw(2, 6, 5, seed=seed)
    return [[common[0] + 0.3 * draw(6, 5, seed=100 + i), common[1, 0] + 0.3 * draw(5, seed=200 + i)] for i in range(n)]


class Recorded(Adam):
    """The gradients that came to Adam."""

    def _adam(self, used, lr, weight_decay):
        self.came = [columns[0].grad.clone() for columns in used]
        super()._adam(used, lr, weight_decay)


class RecordedOrthogonal(OrthogonalAdam, Recorded):
    pass


def test_adam_gets_what_is_orthogonal_to_the_moving_average_of_the_gradients():
    weights = [nn.Parameter(torch.zeros(6, 5)), nn.Parameter(torch.zeros(5))]
    optimizer = RecordedOrthogonal(weights, 1e-3)
    averages = [torch.zeros(6, 5).double(), torch.zeros(5).double()]
    for step, new in enumerate(gradients(12)):
        for weight, gradient in zip(weights, new, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        for i, gradient in enumerate(new):
            g, c = gradient.double().flatten(), averages[i].flatten()
            u = g - (g @ c) / (c @ c) * c if step else g
            assert torch.allclose(optimizer.came[i].double().flatten(), u, atol=1e-5)
            assert step == 0 or abs(float(u @ c)) < 1e-9 * float(c.norm())
            averages[i] = BETA * averages[i] + (1 - BETA) * gradient.double()
            assert torch.allclose(optimizer.histories[i].double(), averages[i], atol=1e-5)


def test_gradients_that_have_nothing_in_common_are_adams():
    """The first is orthogonal to nothing, and each of the others to all before it."""
    ours, theirs = (nn.Parameter(torch.zeros(8)) for _ in range(2))
    optimizers = OrthogonalAdam([ours], 1e-2), Adam([theirs], 1e-2)
    for i in range(8):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = torch.eye(8)[i].clone()
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_the_same_gradient_again_and_again_is_not_followed():
    ours, theirs = (nn.Parameter(torch.zeros(8)) for _ in range(2))
    optimizers = RecordedOrthogonal([ours], 1e-2), Recorded([theirs], 1e-2)
    gradient = draw(8)
    for _ in range(5):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    assert optimizers[0].came[0].abs().max() < 1e-5 * gradient.abs().max()
    assert torch.equal(optimizers[1].came[0], gradient)


def test_a_weight_without_a_gradient_is_left_alone():
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = OrthogonalAdam([used, unused], 1e-2)
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3))
    assert not optimizer.histories[1].any()


def test_a_state_of_plain_adam_is_refused_in_one_line():
    weights = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(UserError, match="its optimizer has 0 histories, not 1"):
        OrthogonalAdam(weights, 1e-2).load_state_dict(Adam(weights, 1e-2).state_dict())


def test_it_has_a_name_and_asks_for_its_learning_rate():
    with pytest.raises(UserError, match="the optimizer is orthogonal-adam, and the recipe's lr is for adam: give lr"):
        Learner(resnet18(4), buffer=8, optimizer="orthogonal-adam", device="cpu")
    learner = Learner(resnet18(4), buffer=8, optimizer="orthogonal-adam", lr=1e-3, device="cpu")
    assert type(learner.optimizer) is OrthogonalAdam


def test_a_learner_with_it_goes_on_bit_by_bit():
    def made(seed):
        torch.manual_seed(seed)
        model = resnet18(4, norm="group")
        return Learner(model, RandomReplace(), 8, optimizer="orthogonal-adam", lr=1e-3, seed=seed, device="cpu")

    def learn(learner, seeds):
        return [learner.learn_many(random_images(8, seed=seed)).loss for seed in seeds]

    learner, other = made(0), made(1)
    learn(learner, range(3))
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert learn(other, range(3, 6)) == learn(learner, range(3, 6))
    for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
