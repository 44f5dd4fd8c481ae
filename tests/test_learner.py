import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from streamclr import (
    ContrastScoring,
    FIFOReplace,
    Learner,
    RandomReplace,
    Reservoir,
    Step,
    UserError,
    open_stream,
    resnet18,
)
from streamclr.compute.ranks import Alone
from streamclr.policy import POLICIES
from support.images import random_images


def make(policy=None, **options):
    torch.manual_seed(0)
    defaults = {"buffer_size": 8, "lr": 1e-3, "seed": 3, "device": "cpu"}
    return Learner(resnet18(width=4), policy, **(defaults | options))


def learn(learner, n_steps, n=8, first=0):
    return [learner.learn_many(random_images(n, seed=first + step)) for step in range(n_steps)]


def test_step_tells_what_happened():
    learner = make()
    steps = learn(learner, 3)
    assert [step.number for step in steps] == [1, 2, 3]
    assert [step.seen for step in steps] == [8, 16, 24]
    assert [(step.kept, step.replaced, step.rescored) for step in steps[:1]] == [(0, 8, 0)]
    for step in steps[1:]:
        assert step.kept + step.replaced == 8
        assert step.rescored == 1
        assert 0 < step.score < 2
        assert step.seconds_scoring > 0
        assert step.seconds_training > 0
    assert steps[-1].score == pytest.approx(float(learner.buffer.scores.mean()))
    assert 0 < steps[0].loss < 10
    assert str(Step(120, 30720, 4.8123, 225, 31, 0.017, 0.3, 0.1, 0.2)) == (
        "step 120 | loss 4.812 | 31 of 256 replaced | 1.7 % re-scored"
    )
    with pytest.raises(AttributeError):
        steps[0].loss = 0


def test_it_learns():
    """On 32 images the loss falls below that of guessing, log(2n - 1), by far more than rounding changes."""
    learner = make(FIFOReplace(), buffer_size=32)
    images = open_stream("synthetic:?stc=1&size=16").read(32)
    losses = [learner.learn_many(images).loss for _ in range(60)]
    assert sum(losses[-10:]) / 10 < math.log(63) - 0.1


@pytest.mark.parametrize("sizes", [[1, 1, 1, 5], [3, 20, 2], [100], [8, 8]])
@pytest.mark.parametrize("policy", POLICIES)
def test_any_segment_size(policy, sizes):
    learner = make(POLICIES[policy]())
    for i, n in enumerate(sizes):
        step = learner.learn_many(random_images(n, seed=i))
        assert math.isfinite(step.loss)
    assert step.seen == sum(sizes)
    assert len(learner.buffer) == min(8, sum(sizes))


@pytest.mark.parametrize("rescore_every", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("n", [3, 8])
def test_the_rescored_share_is_at_most_one_in_t(rescore_every, n):
    learner = make(ContrastScoring(rescore_every), buffer_size=8)
    shares = [step.rescored for step in learn(learner, 40, n)]
    assert sum(shares) / len(shares) <= 1 / rescore_every
    for i in range(1, len(shares)):
        assert sum(shares[: i + 1]) <= (i + 1) / rescore_every + 1e-9
    if rescore_every > 1:
        assert sum(shares) < 40 / rescore_every


def test_t_1_equals_scoring_everything_each_step():
    class Everything:
        def keep(self, pool, size, model):
            from streamclr import contrast_score

            scores = contrast_score(model, pool.images)
            pool.score.copy_(scores)
            return scores.topk(size).indices

    ours, reference = make(ContrastScoring(1)), make(Everything())
    for step in range(6):
        images = random_images(8, seed=step)
        a, b = ours.learn_many(images), reference.learn_many(images)
        assert a.loss == b.loss
        assert torch.equal(ours.buffer.arrivals, reference.buffer.arrivals)


def test_fifo_with_segments_of_the_buffers_size_is_no_buffer():
    learner = make(FIFOReplace())
    for step in range(3):
        images = random_images(8, seed=step)
        learner.learn_many(images)
        assert torch.equal(learner.buffer.images, images)


def test_a_batch_smaller_than_the_buffer_is_drawn_from_it():
    learner = make(Reservoir(), buffer_size=16, batch_size=4)
    sizes = []
    learner.model.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    learn(learner, 3)
    assert sizes == [8, 8, 8]  # two views of four images
    assert len(learner.buffer) == 16


def test_several_updates_a_segment():
    learner = make(RandomReplace(), updates_per_segment=3)
    learn(learner, 2)
    assert learner.n_steps == 2
    assert learner.optimizer.n_steps[0] == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_resumed_from_its_state_it_goes_on_bit_by_bit(policy):
    learner = make(POLICIES[policy](), batch_size=6)
    learn(learner, 3)
    state = learner.state_dict()
    kept = copy.deepcopy(state)
    ahead = [step.loss for step in learn(learner, 3, first=3)]
    other = make(POLICIES[policy](), batch_size=6, seed=99)
    other.load_state_dict(state)
    assert [step.loss for step in learn(other, 3, first=3)] == ahead
    assert torch.equal(learner.buffer.images, other.buffer.images)
    for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    # The state was a copy: learning on changed nothing in it.
    assert torch.equal(state["buffer"]["images"], kept["buffer"]["images"])
    assert all(torch.equal(state["model"][key], kept["model"][key]) for key in kept["model"])


def test_seed_decides_everything_and_the_global_generator_is_left_alone():
    random_state = torch.get_rng_state()
    losses = []
    for seed in (1, 1, 2):
        learner = Learner(buffer_size=4, seed=seed, device="cpu", encoder=None, policy=RandomReplace(seed))
        losses.append(learner.learn_many(random_images(4)).loss)
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_any_module_can_be_the_encoder_and_numpy_the_images():
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    learner = Learner(encoder, buffer_size=4, device="cpu")
    step = learner.learn_many(np.random.default_rng(0).integers(0, 256, (6, 3, 20, 20), dtype=np.uint8))
    assert math.isfinite(step.loss)
    assert learner.encoder is encoder


def test_flipped_numpy_images():
    frames = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)
    assert math.isfinite(make().learn_many(frames[:, ::-1]).loss)


def test_a_state_that_does_not_fit_changes_nothing():
    learner, other = make(), make(buffer_size=4)
    learn(learner, 2)
    before = other.state_dict()
    with pytest.raises(UserError, match="buffer_size=8"):
        other.load_state_dict(learner.state_dict())
    wide = Learner(resnet18(width=8), buffer_size=8, device="cpu")
    with pytest.raises(UserError, match="does not fit"):
        wide.load_state_dict(learner.state_dict())
    assert all(torch.equal(value, before["model"][key]) for key, value in other.model.state_dict().items())
    assert len(other.buffer) == len(wide.buffer) == 0
    learn(other, 1)
    learn(wide, 1)


def test_contrast_scoring_takes_over_from_a_policy_without_scores():
    learner = make(FIFOReplace())
    learn(learner, 2)
    learner.policy = ContrastScoring(rescore_every=50)
    learn(learner, 1, first=2)
    assert learner.buffer.scores.isfinite().all()


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (torch.rand(4, 3, 16, 16), "uint8"),
        (torch.zeros(4, 16, 16, 3, dtype=torch.uint8), "n x 3"),
        (torch.zeros(3, 16, 16, dtype=torch.uint8), "n x 3"),
        (torch.zeros(4, 1, 16, 16, dtype=torch.uint8), "n x 3"),
        (torch.zeros(0, 3, 16, 16, dtype=torch.uint8), "at least 1"),
    ],
)
def test_bad_segments(images, told):
    learner = make()
    with pytest.raises(UserError, match=told):
        learner.learn_many(images)
    assert learner.n_steps == 0


@pytest.mark.parametrize(
    "options",
    [
        {"buffer_size": 1},
        {"batch_size": 9},
        {"batch_size": 1},
        {"updates_per_segment": 0},
        {"temperature": 0},
        {"lr": -1},
        {"weight_decay": -1},
    ],
)
def test_bad_options(options):
    with pytest.raises(UserError, match=next(iter(options))):
        make(**options)


def test_a_loss_that_is_not_finite_stops_before_it_touches_the_weights():
    learner = make()
    learn(learner, 1)
    with torch.no_grad():
        learner.model.head[2].bias[0] = torch.nan
    before = [p.clone() for p in learner.encoder.parameters()]
    with pytest.raises(UserError, match="the loss at step 2 is not finite"):
        learn(learner, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.encoder.parameters(), strict=True))


def test_compile_needs_a_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        make(compile=True)


def test_a_compiled_model_stays_compiled_in_a_run():
    learner = make()
    learner._trained = compiled = nn.Sequential(learner.model)
    learner.join(Alone())  # as every run does
    assert learner._trained is compiled
    learner.leave()
    assert learner._trained is compiled


@pytest.mark.long
def test_a_compiled_model_learns_the_same():
    plain, compiled = make(), make(compile=True)
    for step in range(3):
        images = random_images(8, seed=step)
        assert plain.learn_many(images).loss == pytest.approx(compiled.learn_many(images).loss, rel=1e-3)
