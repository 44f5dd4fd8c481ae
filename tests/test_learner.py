import copy
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from streamclr import (
    ContrastScoring,
    FIFOReplace,
    Guarded,
    Learner,
    RandomReplace,
    Reservoir,
    Step,
    UserError,
    open_stream,
    resnet18,
)
from streamclr.compute.ranks import OneProcess
from streamclr.encoders.inference import infer
from streamclr.policy import POLICIES
from streamclr.score import contrast_score
from support.images import random_images


def make(policy=None, **options):
    torch.manual_seed(0)
    defaults = {"buffer": 8, "lr": 1e-3, "seed": 3, "device": "cpu"}
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
    learner = make(FIFOReplace(), buffer=32)
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
    learner = make(ContrastScoring(rescore_every), buffer=8)
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
    learner = make(Reservoir(), buffer=16, batch_size=4)
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


def in_scenes(step, n_scenes=2, n=4):
    """A segment of scenes, whose frames are one picture that gets brighter, and the number of the scene of each."""
    pictures = random_images(n_scenes, seed=100 + step).clamp(max=200)
    brighter = torch.arange(n, dtype=torch.uint8).view(1, n, 1, 1, 1)
    return (pictures[:, None] + brighter).flatten(0, 1), torch.arange(n_scenes).repeat_interleave(n)


@pytest.mark.parametrize("known", [True, False])
def test_positives_in_time_are_frames_of_the_same_scene(known, monkeypatch):
    learner, seen = make(RandomReplace(), positives="time"), []
    pairs = learner.buffer.pairs
    monkeypatch.setattr(learner.buffer, "pairs", lambda rows: seen.append(pairs(rows)) or seen[-1])
    for step in range(4):
        images, tracks = in_scenes(step)
        learner.learn_many(images, tracks if known else None)
    for batch, neighbours in seen:
        difference = (neighbours.int() - batch.int()).flatten(1)
        assert (difference == difference[:, :1]).all()  # the same picture
        assert (difference[:, 0] != 0).all()  # another frame of it
        assert difference[:, 0].abs().max() <= 3


def test_positives_in_time_keep_within_reach(monkeypatch):
    learner = make(RandomReplace(), positives="time", reach=1)
    for step in range(3):
        learner.learn_many(*in_scenes(step))
        batch, neighbours = learner.buffer.pairs(torch.arange(8))
        assert ((neighbours.int() - batch.int()).abs() == 1).all()


def test_positives_in_time_resume_bit_by_bit():
    learner, other = (make(RandomReplace(), positives="time", seed=seed) for seed in (3, 99))
    for step in range(3):
        learner.learn_many(*in_scenes(step))
    other.load_state_dict(learner.state_dict())
    ahead = [[one.learn_many(*in_scenes(step)).loss for step in (3, 4)] for one in (learner, other)]
    assert ahead[0] == ahead[1]
    assert same(learner.state_dict(), other.state_dict())
    with pytest.raises(UserError, match="neighbours"):
        learner.load_state_dict(make(RandomReplace()).state_dict())


def test_a_buffer_in_bytes_holds_what_fits():
    image = 3 * 16 * 16
    for positives, n in (("views", 80), ("time", 40)):
        learner = make(RandomReplace(), buffer=str(80 * image + 5), batch_size=6, positives=positives)
        for step in range(12):
            learner.learn_many(random_images(8, seed=step))
        assert (learner.buffer.size, len(learner.buffer)) == (n, n)
        other = make(RandomReplace(), buffer=str(80 * image + 5), batch_size=6, positives=positives)
        other.load_state_dict(learner.state_dict())
        assert len(other.buffer) == n
    with pytest.raises(UserError, match="batch_size is 64, and the buffer holds 40"):
        make(RandomReplace(), buffer=str(40 * image)).learn_many(random_images(8))


def test_seed_decides_everything_and_the_global_generator_is_left_alone():
    random_state = torch.get_rng_state()
    losses = []
    for seed in (1, 1, 2):
        learner = Learner(buffer=4, seed=seed, device="cpu", encoder=None, policy=RandomReplace(seed))
        losses.append(learner.learn_many(random_images(4)).loss)
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_any_module_can_be_the_encoder_and_numpy_the_images():
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    learner = Learner(encoder, buffer=4, device="cpu")
    step = learner.learn_many(np.random.default_rng(0).integers(0, 256, (6, 3, 20, 20), dtype=np.uint8))
    assert math.isfinite(step.loss)
    assert learner.encoder is encoder


def test_flipped_numpy_images():
    frames = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)
    assert math.isfinite(make().learn_many(frames[:, ::-1]).loss)


def same(a, b):
    """Whether two states are equal to the bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        return torch.equal(torch.nan_to_num(a.double(), nan=-7), torch.nan_to_num(b.double(), nan=-7))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def without(state, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


MISFITS = {
    "a larger buffer": (lambda: make(RandomReplace(), buffer=16), lambda state: state, "buffer=16"),
    "another width": (lambda: Learner(resnet18(8), RandomReplace(), 8, device="cpu"), lambda s: s, "does not fit"),
    "another policy": (lambda: make(ContrastScoring()), lambda s: s, "ContrastScoring"),
    "another policy, same keys": (lambda: make(Reservoir()), lambda s: s, "Reservoir.*RandomReplace"),
    "a policy without a state": (lambda: make(FIFOReplace()), lambda s: s, "FIFOReplace"),
    "another policy, name unknown": (lambda: make(ContrastScoring()), lambda s: without(s, "policy_name"), "fast"),
    "a guarded one": (lambda: make(Guarded(RandomReplace())), lambda s: without(s, "policy_name"), "kept_out"),
    "no optimizer": (lambda: make(RandomReplace()), lambda s: without(s, "optimizer"), "optimizer"),
    "moments missing": (lambda: make(RandomReplace()), lambda s: without(s, "optimizer", "means", 3), "optimizer"),
    "a column missing": (lambda: make(RandomReplace()), lambda s: without(s, "buffer", "ages"), "ages"),
    "no generator": (lambda: make(RandomReplace()), lambda s: s | {"generator": torch.zeros(3).byte()}, "generator"),
    "no model": (lambda: make(RandomReplace()), lambda s: s | {"model": {}}, "is missing"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_changes_nothing(name):
    other, change, told = MISFITS[name]
    source, learner = other(), make(RandomReplace())
    learn(source, 2, n=source.buffer.size)
    learn(learner, 1)
    before = learner.state_dict()
    with pytest.raises(UserError, match=told):
        learner.load_state_dict(change(source.state_dict()))
    assert same(learner.state_dict(), before)
    learn(learner, 1)


def test_a_state_of_the_version_before_loads():
    learner, other = make(RandomReplace()), make(RandomReplace(), seed=9)
    learn(learner, 2)
    state = learner.state_dict()
    other.load_state_dict(without(without(state, "random_state"), "policy_name"))
    assert [step.loss for step in learn(learner, 2)] == [step.loss for step in learn(other, 2)]


def with_dropout(seed=3):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5))
    return Learner(encoder, RandomReplace(), buffer=8, lr=1e-2, seed=seed, device="cpu")


def test_an_encoder_with_dropout_resumes_bit_by_bit_and_leaves_the_global_generator_alone():
    learner = with_dropout()
    learn(learner, 2)
    state, random_state = learner.state_dict(), torch.get_rng_state()
    ahead = [step.loss for step in learn(learner, 3, first=2)]
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.manual_seed(77)
    other = with_dropout(seed=9)
    other.load_state_dict(state)
    assert [step.loss for step in learn(other, 3, first=2)] == ahead


class Draws:
    """A policy that draws and forgets to save its generator."""

    def __init__(self, generator):
        self.generator = generator

    def keep(self, pool, size, model):
        return torch.arange(size)


@pytest.mark.parametrize("wrap", [lambda policy: policy, Guarded])
@pytest.mark.parametrize(
    "generator", [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]
)
def test_a_policy_whose_generator_would_not_be_saved_is_refused(generator, wrap):
    learner = make(wrap(Draws(generator)))
    learn(learner, 1)  # nothing is lost without a checkpoint
    with pytest.raises(UserError, match=r"Draws.*add state_dict and load_state_dict"):
        learner.state_dict()


@pytest.mark.parametrize("keep", [lambda n: list(range(n)), np.arange, torch.arange])
def test_a_policy_may_return_whole_numbers_of_any_kind(keep):
    class Kind:
        def keep(self, pool, size, model):
            return keep(size)

    for policy in (Kind(), Guarded(Kind())):
        learner = make(policy)
        learn(learner, 2)
        assert len(learner.buffer) == 8


@pytest.mark.parametrize(
    "keep",
    [
        lambda n: torch.arange(n) / 1,
        lambda n: torch.ones(n, dtype=torch.bool),
        lambda n: [True] * n,
        lambda n: torch.arange(n)[:, None],
        lambda n: None,
        lambda n: {"keep": torch.arange(n)},
        lambda n: [torch.arange(n), torch.arange(n + 1)],
    ],
)
def test_a_policy_that_returns_no_indices_is_told_in_one_line(keep):
    class Wrong:
        def keep(self, pool, size, model):
            return keep(size)

    for policy in (Wrong(), Guarded(Wrong())):
        with pytest.raises(UserError, match=r"the policy returned .*: return .*indices"):
            learn(make(policy), 1)


def test_an_extractor_standardises_and_neither_trains_nor_changes():
    learner = make()
    learn(learner, 2)
    images, before = random_images(5), copy.deepcopy(learner.model.state_dict())
    extract = learner.extractor()
    features = extract(images)
    assert features.shape == (5, extract.n_features) == (5, 32)
    assert features.device.type == "cpu"
    assert not features.requires_grad
    assert torch.allclose(features, infer(learner.model, images, learner.model.features))
    assert same(dict(learner.model.state_dict()), dict(before))
    assert learner.encoder.training
    learn(learner, 2, first=2)
    assert torch.equal(extract(images.numpy()), features)  # later steps do not change it
    assert not torch.allclose(learner.extractor()(images), features)
    with pytest.raises(UserError, match="uint8"):
        extract(images / 255)
    with pytest.raises(UserError, match="n x 3"):
        extract(images[0])


@pytest.mark.system
def test_the_method_loads_no_reader_no_server_and_no_run_directory():
    code = "import sys, streamclr.learner; print(*(name for name in sys.modules if name.startswith('streamclr.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = {name.split(".")[1] for name in loaded}
    assert "learner" in rooms
    above = "streams records models labelling runs sweeps fleet web experiments cli"
    assert not rooms & set(above.split())


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
        {"buffer": 1},
        {"batch_size": 9},
        {"batch_size": 1},
        {"updates_per_segment": 0},
        {"temperature": 0},
        {"lr": -1},
        {"weight_decay": -1},
        {"precision": "half"},
        {"precision": "bf16", "memory": "1G"},
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
    with pytest.raises(UserError, match="compile needs a C\\+\\+ compiler"):
        make(compile=True)


def test_a_compiled_model_stays_compiled_in_a_run():
    learner = make()
    learner._trained = compiled = nn.Sequential(learner.model)
    learner.join(OneProcess())  # as every run does
    assert learner._trained is compiled
    learner.leave()
    assert learner._trained is compiled


@pytest.mark.long
@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-3), ("bf16", 2e-2)])
def test_a_compiled_model_learns_the_same(precision, rel):
    plain, compiled = make(precision=precision), make(compile=True, precision=precision)
    for step in range(3):
        images = random_images(8, seed=step)
        assert plain.learn_many(images).loss == pytest.approx(compiled.learn_many(images).loss, rel=rel)


def test_in_bfloat16_it_resumes_bit_by_bit():
    learner, exact = make(RandomReplace(), precision="bf16"), make(RandomReplace())
    steps = learn(learner, 2)
    assert [step.loss for step in steps] != [step.loss for step in learn(exact, 2)]
    other = make(RandomReplace(), precision="bf16", seed=99)
    other.load_state_dict(learner.state_dict())
    assert [step.loss for step in learn(other, 2, first=2)] == [step.loss for step in learn(learner, 2, first=2)]
    for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == torch.float32


def test_after_training_in_bfloat16_scores_and_features_are_exact():
    learner = make(precision="bf16")
    learn(learner, 1)
    learner.model.train()  # as between two steps
    exact, images = copy.deepcopy(learner.model), random_images(6)
    exact.in_bf16 = False
    assert torch.equal(contrast_score(learner.model, images), contrast_score(exact, images))
    for function in ("forward", "features"):
        found = infer(learner.model, images, getattr(learner.model, function))
        assert torch.equal(found, infer(exact, images, getattr(exact, function)))
    assert torch.equal(learner.extractor()(images), infer(exact, images, exact.features))
