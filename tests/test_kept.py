"""Views that are kept behind the frozen stages: the same update, made from what is kept."""

import pytest
import torch

from streamclr import BYOL, FIFOReplace, Learner, Reservoir, StrongViews, UserError, compact, mobilenet_v2
from streamclr.kept import KeptViews, kept_bytes, kept_shape
from streamclr.records.options import RunOptions
from streamclr.records.plan import open_run_stream, resolve
from support.images import random_images


def learner(**options):
    usual = {"recipe": "device", "policy": Reservoir(0), "buffer": 12, "batch_size": 8, "train": "2", "kept_views": 2}
    return Learner(compact(8), **usual | options)


def test_an_update_from_what_is_kept_is_the_update_of_these_views():
    own, plain = learner(), learner(kept_views=0)
    own.learn_many(random_images(12, 32, seed=1))
    plain.load_state_dict(
        own.state_dict() | {"buffer": {k: v for k, v in own.buffer.state_dict().items() if k != "kept"}}
    )
    views = torch.rand(16, 3, 24, 24)
    plain.model.train()
    z = plain.model(views)
    z.square().mean(0).max().backward()
    own.model.train()
    kept = own.model.early(views).half().float()
    again = own.model.from_early(kept)
    again.square().mean(0).max().backward()
    torch.testing.assert_close(again, z, atol=2e-3, rtol=0)
    for mine, other in zip(own.model.parameters(), plain.model.parameters(), strict=True):
        assert (mine.grad is None or not mine.grad.any()) == (other.grad is None or not other.grad.any())


def test_views_are_those_of_the_image_and_its_neighbour():
    """Flat images stay flat whatever the views do, so that what is kept tells which image it is of."""
    model = learner(positives="time").model
    shade = torch.arange(6, dtype=torch.uint8) * 40
    images = shade.view(6, 1, 1, 1).expand(6, 3, 32, 32).contiguous()
    own = learner(positives="time", buffer=6, batch_size=6, views=lambda images, generator: images / 255)
    own.model.load_state_dict(model.state_dict())
    own.learn_many(images, tracks=torch.tensor([0, 0, 1, 1, 2, 2]))
    own.model.train()
    with torch.no_grad():
        early = own.model.early(own.buffer.images / 255).half()
        beside = own.model.early(own.buffer.pairs(torch.arange(5))[1] / 255).half()
    rows = torch.tensor([4, 1, 3])
    first, second = own.kept.draw(own.buffer, rows).chunk(2)
    torch.testing.assert_close(first, early[rows].float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(second, beside[rows].float(), atol=1e-2, rtol=1e-2)
    assert not torch.allclose(first, second, atol=1e-2)  # of another frame


def test_views_are_made_once_when_an_image_enters():
    own = learner()
    own.learn_many(random_images(12, 32, seed=1))
    before = {int(n): kept for n, kept in zip(own.buffer.arrivals, own.buffer.kept.clone(), strict=True)}
    own.learn_many(random_images(12, 32, seed=2))
    stayed = [i for i, n in enumerate(own.buffer.arrivals.tolist()) if n in before]
    entered = [i for i, n in enumerate(own.buffer.arrivals.tolist()) if n not in before]
    assert stayed
    assert entered
    for i in stayed:
        assert torch.equal(own.buffer.kept[i], before[int(own.buffer.arrivals[i])])
    assert own.buffer.kept[entered].flatten(1).any(1).all()


def test_a_step_in_which_no_image_enters():
    class First:
        def keep(self, pool, size, model):
            return pool.arrival.topk(size, largest=False).indices

    own = learner(policy=First())
    own.learn_many(random_images(12, 32, seed=1))
    assert own.learn_many(random_images(12, 32, seed=2)).replaced == 0


def test_a_resumed_learner_takes_the_same_steps():
    one = learner()
    for seed in range(3):
        one.learn_many(random_images(8, 32, seed=seed))
    other = learner()
    other.load_state_dict(one.state_dict())
    steps = [own.learn_many(random_images(8, 32, seed=9)) for own in (one, other)]
    assert steps[0].loss == steps[1].loss
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_it_learns_and_frozen_stages_stay():
    own = learner(buffer=64, batch_size=32, policy=FIFOReplace())
    before = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    images = random_images(64, 32, seed=0)
    losses = [own.learn_many(images).loss for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1
    after = own.model.state_dict()
    assert all(
        torch.equal(before[name], after[name]) for name in before if name.startswith(("encoder.stem", "encoder.stage1"))
    )
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("encoder.stage3"))


def test_bytes_of_the_buffer_count_what_is_kept():
    how = {"batch_size": 4, "train": "2", "kept_views": 3, "positives": "time", "views": StrongViews(flip=False)}
    own = Learner(mobilenet_v2(), recipe="device", buffer="2M", **how)
    own.fit((4, 3, 64, 64))
    shape = kept_shape(3, own.model.encoder, own.views, (3, 64, 64))
    assert shape == (6, 32, 8, 8)
    assert own.buffer.size == 2 * 2**20 // (2 * 3 * 64 * 64 + kept_bytes(shape))
    options = RunOptions(
        "synthetic:?size=64", encoder="mobilenet_v2", init="random", train="2", kept_views=3, buffer="2M"
    )
    options = RunOptions(**vars(options) | {"batch": 4, "images": 64, "positives": "time"})
    assert resolve(options, open_run_stream(options)).buffer == own.buffer.size


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"train": "all"}, "all stages of the encoder learn: give train"),
        ({"kept_views": -1}, "kept_views is -1: use 0"),
        ({"memory": "2G"}, "both kept_views and memory are given"),
        ({"loss": BYOL()}, "target network are given"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(options, what):
    with pytest.raises(UserError, match=what):
        learner(**options)


def test_an_encoder_without_stages_is_refused():
    encoder = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    with pytest.raises(UserError, match="stages of a Sequential are not known"):
        Learner(encoder, recipe="device", buffer=8, train="all", kept_views=1)


def test_each_view_is_drawn():
    own = learner(kept_views=3, positives="views")
    own.learn_many(random_images(12, 32))
    kept = KeptViews(3, own.views, torch.Generator().manual_seed(0))
    drawn = torch.cat([kept.draw(own.buffer, torch.zeros(8, dtype=torch.long)) for _ in range(8)])
    assert len(drawn.flatten(1).unique(dim=0)) == 6
