import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from streamclr import ContrastScoring, UserError, compact, contrast_score, open_stream, resnet18, resnet50
from streamclr.base.machine import cache_dir
from streamclr.buffer import Buffer, Pool
from streamclr.compute import fast_scoring as inference_module
from streamclr.compute.fast_scoring import FoldedConv, Int8Conv, fastest
from streamclr.compute.memory import MIB, resident
from streamclr.encoders.inference import inference_mode
from streamclr.encoders.mobilenet import mobilenet_v2
from streamclr.encoders.projection import ContrastiveModel
from streamclr.score import rank_correlation
from streamclr.views import flip
from support.images import random_images


def trained(make, size=32, steps=6, **options):
    """A model whose weights and statistics have moved, at a size that costs little."""
    torch.manual_seed(0)
    model = ContrastiveModel(make(**options)).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for images in open_stream(f"synthetic:?size={size}").segments(32, until=32 * steps):
        loss = model(images / 255).square().sum(0).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def wide():
    torch.set_num_threads(1)
    return trained(resnet18, width=16)


@pytest.fixture(scope="module")
def images():
    return open_stream("synthetic:?size=32&stc=1").read(256)


@pytest.mark.parametrize("make", [partial(resnet18, 8), partial(resnet50, 8), partial(compact, 8), mobilenet_v2])
def test_the_exact_score_is_that_of_layer_by_layer(make):
    """In inference every stage runs folded, unless somebody watches the layers by hooks."""
    model, images = trained(make, 48, steps=2), random_images(20, size=48)
    found = contrast_score(model, images)
    next(model.encoder.children()).register_forward_hook(lambda *_: None)
    due = contrast_score(model, images)
    assert not torch.equal(found, due)
    torch.testing.assert_close(found, due, atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["int8", "half"])
def test_compact_has_every_precision(images, precision):
    model, images = trained(compact, steps=2, width=8), images[:100]
    with inference_mode(model):
        fast, exact = (inference_module.projection(model, images, p)(images / 255) for p in (precision, "fp32"))
    assert (fast * exact).sum(1).mean() > 0.99


def test_mobilenet_is_not_scored_in_int8(images):
    """Its linear bottlenecks lose too much in 8 bits: see `precisions`."""
    model, images = trained(mobilenet_v2, steps=2), images[:20]
    with inference_mode(model):
        half, exact = (inference_module.projection(model, images, p)(images[:4] / 255) for p in ("half", "fp32"))
    assert (half * exact).sum(1).mean() > 0.99
    with pytest.raises(UserError, match="cannot be scored in 'int8': use auto, fp32, half"):
        contrast_score(model, images, "int8")
    assert inference_module._measured(model, images[:8]) == "fp32"


@pytest.mark.parametrize("make", [resnet18, resnet50])
@pytest.mark.parametrize(("stem", "size"), [("small", 16), ("half", 24), ("imagenet", 48)])
@pytest.mark.parametrize("precision", ["int8", "half"])
def test_fast_is_near_exact_for_every_shape_of_encoder(make, stem, size, precision):
    model = trained(make, size, steps=2, width=8, stem=stem)
    images = open_stream(f"synthetic:?size={size}&stc=1").read(100)
    with inference_mode(model):
        fast, exact = (inference_module.projection(model, images, p)(images / 255) for p in (precision, "fp32"))
    assert (fast * exact).sum(1).mean() > 0.99
    fast, exact = contrast_score(model, images, precision), contrast_score(model, images)
    if make is resnet18 or precision == "half":
        assert rank_correlation(fast, exact) > 0.95


def test_auto_scores_exactly_where_int8_does_not_rank_well_enough(monkeypatch):
    """Fifty narrow layers, hardly trained: int8 ranks at 0.91 to 0.98, by the initial weights."""
    model = trained(resnet50, 16, steps=2, width=8)
    images = open_stream("synthetic:?size=16&stc=1").read(100)
    monkeypatch.setattr("streamclr.policy.fastest", lambda model, images: "int8")
    assert rank_correlation(contrast_score(model, images, "int8"), contrast_score(model, images)) < 0.98
    pool = Buffer(50).pool(images)
    kept = ContrastScoring(precision="auto").keep(pool, 50, model)
    assert set(kept.tolist()) == set(contrast_score(model, images).topk(50).indices.tolist())


def test_int8_chooses_what_the_exact_score_chooses(wide, images):
    fast, exact = contrast_score(wide, images, "int8"), contrast_score(wide, images)
    assert rank_correlation(fast, exact) > 0.98
    chosen, due = (set(score.topk(128).indices.tolist()) for score in (fast, exact))
    assert len(chosen & due) >= 0.95 * 128


@pytest.mark.parametrize("precision", ["fp32", "int8", "half"])
def test_fast_changes_nothing_and_repeats(wide, images, precision):
    modes = [module.training for module in wide.modules()]
    state = {key: value.clone() for key, value in wide.state_dict().items()}
    score = contrast_score(wide, images[:70], precision)
    assert torch.equal(score, contrast_score(wide, images[:70], precision))
    assert ((score >= 0) & (score <= 2)).all()
    assert modes == [module.training for module in wide.modules()]
    assert all(torch.equal(value, state[key]) for key, value in wide.state_dict().items())
    assert not score.requires_grad


def test_a_mirror_symmetric_image_scores_zero_in_int8(wide, images):
    symmetric = torch.maximum(images[:6], flip(images[:6]))
    assert (contrast_score(wide, symmetric, "int8") <= 1e-6).all()


def test_fast_follows_the_weights(images):
    """Nothing of the model before an update is used after it."""
    model = trained(resnet18, steps=1, width=8)
    before = contrast_score(model, images[:64], "int8")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = contrast_score(model, images[:64], "int8")
    assert not torch.allclose(before, after)
    assert rank_correlation(after, contrast_score(model, images[:64])) > 0.9


@pytest.mark.parametrize("shape", [(1, 1), (7, 8), (16, 17), (48, 48)])
def test_max_pool_is_the_stems(shape):
    x = torch.randint(256, (2, 5, *shape), dtype=torch.uint8)
    assert torch.equal(inference_module._max_pool(x).float(), F.max_pool2d(x.float(), 3, 2, 1))


@pytest.mark.parametrize("channels", [3, 8, 64])
def test_int8_does_not_overflow(channels):
    """The largest weights of one sign on the largest activations: 16 bits are too few for two products of them."""
    conv, norm = nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, eps=0).eval()
    for weight in (torch.ones_like(conv.weight), -torch.ones_like(conv.weight), torch.randn_like(conv.weight).sign()):
        conv.weight.data = weight
        x = torch.ones(2, channels, 8, 8)
        with torch.no_grad():
            folded = FoldedConv(conv, norm, torch.float32)
            exact = folded(x)
            fast = Int8Conv(folded, 1 / 255)
            fast.set_range(exact)
            quantised = torch.full(x.shape, 255, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
            out = (fast(quantised, relu=False).float() - fast.out_zero) * fast.out_scale
        assert torch.allclose(out, exact, atol=1.5 * fast.out_scale + 0.02 * exact.abs().max())


def test_memory_stays_flat_as_the_encoder_changes():
    """oneDNN keeps a kernel for every scale of a sum that it meets: 15 MiB here were these not on a grid."""
    model, images = trained(resnet18, size=16, steps=1, width=8), random_images(64, size=16)
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for _ in range(60):
        with torch.no_grad():
            for parameter in model.encoder.parameters():
                parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=generator))
        contrast_score(model, images, "int8")
        sizes.append(resident() / MIB)
    assert sizes[-1] - sizes[29] < 4


def test_a_constant_model_and_blank_images_survive():
    model = ContrastiveModel(resnet18(width=8))
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.zero_()
    score = contrast_score(model, torch.zeros(3, 3, 16, 16, dtype=torch.uint8), "int8")
    assert torch.isfinite(score).all()


def test_an_encoder_that_cannot_be_folded_is_scored_exactly(images):
    for encoder in (resnet18(width=8, norm="group"), nn.Sequential(nn.Flatten(), nn.LazyLinear(8))):
        encoder(images[:2] / 255)
        encoder.n_features = 64 if hasattr(encoder, "layer1") else 8
        model = ContrastiveModel(encoder)
        assert fastest(model, images) == "fp32"
        with pytest.raises(UserError, match=r"cannot be scored in 'int8': use auto, fp32$"):
            contrast_score(model, images, "int8")
    with pytest.raises(UserError, match="precision is 'int4'"):
        contrast_score(model, images, "int4")


def test_the_fastest_is_measured_once_and_cached(wide, images, monkeypatch, tmp_path):
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "cache"))
    first = fastest(wide, images)
    assert list(json.loads((cache_dir() / "precision.json").read_text()).values()) == [first]
    monkeypatch.setattr(inference_module, "_measured", lambda *args: pytest.fail("measured again"))
    assert fastest(wide, images) == first


def test_a_cache_that_cannot_be_read_or_written_is_no_error(wide, images, monkeypatch, tmp_path):
    (tmp_path / "precision.json").write_text("{damaged")
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path))
    assert fastest(wide, images) in inference_module.PRECISIONS
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path / "file" / "below"))
    assert fastest(wide, images) in inference_module.PRECISIONS


def test_without_int8_kernels_something_else_is_the_fastest(wide, images, monkeypatch):
    class Missing:
        def __init__(self, *args):
            raise RuntimeError("no kernel")

    monkeypatch.setattr(inference_module, "Int8Encoder", Missing)
    assert inference_module._measured(wide, images[:8]) == "fp32"


def keep(policy, model, images):
    pool = Buffer(128).pool(images)
    return policy.keep(pool, min(128, len(images)), model), pool


def test_a_state_of_an_earlier_version_names_what_is_fp32_now():
    policy = ContrastScoring(precision="auto")
    policy.load_state_dict(policy.state_dict() | {"fast": "folded"})
    assert policy._fast == "fp32"


def test_auto_returns_to_the_exact_score_when_the_fast_one_ranks_otherwise(wide, images, monkeypatch):
    policy = ContrastScoring(precision="auto")
    policy._fast = "int8"
    keep(policy, wide, images)
    assert policy._trusted
    real = contrast_score

    def unreliable(model, images, precision="fp32"):
        return real(model, images, "fp32") if precision == "fp32" else torch.rand(len(images))

    monkeypatch.setattr("streamclr.policy.contrast_score", unreliable)
    monkeypatch.setattr("streamclr.policy.CHECK_EVERY", 2)
    keep(policy, wide, images)  # not looked at this time
    kept, pool = keep(policy, wide, images)
    assert not policy._trusted
    assert torch.equal(pool.score, real(wide, images))
    other = ContrastScoring(precision="auto")
    other.load_state_dict(policy.state_dict())
    assert not other._trusted
    assert torch.equal(keep(other, wide, images)[0], kept)


def test_a_few_images_are_scored_exactly(wide, images, monkeypatch):
    monkeypatch.setattr("streamclr.policy.fastest", lambda *args: pytest.fail("measured"))
    _, pool = keep(ContrastScoring(precision="auto"), wide, images[:20])
    assert torch.allclose(pool.score, contrast_score(wide, images[:20]))


def test_the_score_is_exact_unless_told_otherwise(wide, images, monkeypatch):
    monkeypatch.setattr("streamclr.policy.fastest", lambda *args: pytest.fail("measured"))
    policy = ContrastScoring()
    _, pool = keep(policy, wide, images)
    assert torch.equal(pool.score, contrast_score(wide, images, "fp32"))
    policy.load_state_dict({"fast": "int8", "trusted": True, "n_fast": 7})  # of a run that chose int8
    _, pool = keep(policy, wide, images)
    assert torch.equal(pool.score, contrast_score(wide, images, "fp32"))


def test_half_keeps_features_in_float(wide, images):
    project = inference_module.projection(wide.eval(), images, "half")
    with torch.no_grad():
        z = project(images[:4] / 255)
    wide.train()
    assert z.dtype == torch.float32
    assert torch.allclose(z.norm(dim=1), torch.ones(4), atol=1e-5)
    assert F.cosine_similarity(z, z).min() > 0.999


def test_only_what_is_due_is_scored_in_a_pool_made_by_hand(wide, images):
    age = torch.tensor([1, 2, 3, 4, 0, 0])
    pool = Pool(images[:6], torch.full((6,), 0.5), age, torch.arange(6))
    ContrastScoring(rescore_every=2).keep(pool, 3, wide)
    assert (pool.score == 0.5).tolist() == [True, False, True, False, False, False]
    pool = Pool(images[:3], torch.full((3,), 0.5), age[:3], torch.arange(3))  # no new image
    ContrastScoring(rescore_every=2).keep(pool, 2, wide)
    assert (pool.score == 0.5).tolist() == [True, False, True]


def test_frames_at_rest_are_encoded_once(wide, images, monkeypatch):
    scored = []
    real = contrast_score
    monkeypatch.setattr(
        "streamclr.policy.contrast_score",
        lambda model, images, *p: scored.append(len(images)) or real(model, images, *p),
    )
    segment = torch.cat([images[:3], images[2:3], images[2:3]])
    _, pool = keep(ContrastScoring(), wide, segment)
    assert scored == [3]
    assert pool.score[2] == pool.score[3] == pool.score[4]
