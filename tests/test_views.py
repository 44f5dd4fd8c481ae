import time

import pytest
import torch
import torch.nn.functional as F

from streamclr import ContrastScoring, Learner, RandomReplace, StrongViews, UserError, contrast_score, resnet18
from streamclr.compute.memory import MemoryPlan
from streamclr.views import GREY, WEAK_VIEWS, _hue_rotation, build_weak_view, flip
from support.images import random_images


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(5, 32, 32), (3, 64, 64), (2, 96, 64), (1, 17, 23)])
def test_shape_range_and_seed(shape):
    n, height, width = shape
    images = torch.randint(256, (n, 3, height, width), dtype=torch.uint8)
    before, random_state = images.clone(), torch.get_rng_state()
    views = StrongViews()
    first = views(images, generator())
    assert first.shape == images.shape
    assert first.dtype == torch.float32
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, views(images, generator()))
    assert not torch.equal(first, views(images, generator(1)))
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_without_randomness_only_the_flip_is_left():
    images = random_images(200)
    views = StrongViews(scale=(1, 1), jitter=0, grey=0, blur=0)(images, generator())
    pixels = images / 255
    same, mirrored = ((views - other).abs().flatten(1).amax(1) < 1e-4 for other in (pixels, flip(pixels)))
    assert (same ^ mirrored).all()
    assert 70 < int(mirrored.sum()) < 130


def test_crops_cover_the_asked_share():
    """On an image of coordinates the spread of a view's pixels is the size of its crop."""
    ramp = torch.linspace(0, 255, 64).byte()
    images = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.zeros(64, 64).byte()]).expand(
        2000, 3, 64, 64
    )
    views = StrongViews(jitter=0, grey=0, blur=0)(images, generator())
    width = (views[:, 0].amax((1, 2)) - views[:, 0].amin((1, 2))) * 64 / 63
    height = (views[:, 1].amax((1, 2)) - views[:, 1].amin((1, 2))) * 64 / 63
    area, ratio = width * height, width / height
    assert area.min() > 0.15
    assert area.max() < 1.05
    assert 0.5 < area.mean() < 0.65
    assert ratio.min() > 0.7
    assert ratio.max() < 1.45


def test_grey_and_hue_keep_the_luma():
    images = random_images(50)
    grey = StrongViews(scale=(1, 1), jitter=0, grey=1)(images, generator())
    assert torch.allclose(grey[:, 0], grey[:, 1], atol=1e-5)
    assert torch.allclose(grey[:, 0], grey[:, 2], atol=1e-5)
    turned = _hue_rotation(torch.tensor([0.0, 1.0, -2.0]))
    assert torch.allclose(turned[0], torch.eye(3), atol=1e-5)
    luma = torch.tensor(GREY)
    assert torch.allclose(luma @ turned, luma.expand(3, 3), atol=1e-4)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_colour_jitter_is_one_affine_map_with_the_asked_strength(strength):
    """A flat grey image keeps its grey under contrast, saturation and hue; brightness alone moves it."""
    images = torch.full((2000, 3, 8, 8), 100, dtype=torch.uint8)
    views = StrongViews(strength=strength, jitter=1, grey=0)(images, generator()) * 255 / 100
    reach = min(1, 0.8 * strength)
    assert views.min() == pytest.approx(1 - reach, abs=0.03)
    assert views.max() == pytest.approx(1 + reach, abs=0.03)
    assert (views.flatten(1).std(1) < 1e-3).all()


def test_blur_smooths_and_keeps_the_mean():
    images = random_images(8, size=64)
    plain, blurred = (StrongViews(scale=(1, 1), jitter=0, grey=0, blur=p)(images, generator()) for p in (0, 1))
    spread, before = blurred.flatten(1).std(1), plain.flatten(1).std(1)
    assert (spread <= before).all()
    assert spread.mean() < 0.7 * before.mean()
    assert torch.allclose(blurred.mean((1, 2, 3)), plain.mean((1, 2, 3)), atol=0.02)


def test_views_take_no_longer_than_fifteen_times_their_resampling():
    """So does a machine of any speed; on one core of a usual one they are 30,000 a second."""
    images, views, random = random_images(512, size=32), StrongViews(), generator()
    pixels, places = images / 255, F.affine_grid(torch.eye(2, 3).expand(512, 2, 3), images.shape, align_corners=False)

    def seconds(work):
        started = time.process_time()  # of this process: what else the machine does is not counted
        work()
        return time.process_time() - started

    each = [
        (seconds(lambda: views(images, random)), seconds(lambda: F.grid_sample(pixels, places, align_corners=False)))
        for _ in range(8)
    ]
    ours, resampling = map(min, zip(*each, strict=True))
    assert ours < 15 * resampling


@pytest.mark.parametrize("size", [16, 72])
def test_views_made_some_at_a_time_are_the_same_views(size):
    images, views = random_images(10, size=size), StrongViews()
    draw = views.draw(images.shape, generator())
    parts = [views.apply(images[rows], draw.rows(rows)) for rows in (slice(0, 3), slice(3, 4), slice(4, 10))]
    assert torch.allclose(torch.cat(parts), views(images, generator()), atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": (-1, 0.2)},
        {"scale": (0, 1)},
        {"scale": (0.5, 0.2)},
        {"scale": (0.2, 1.5)},
        {"scale": 0.5},
        {"scale": (0.2, float("nan"))},
        {"strength": -1},
        {"strength": float("inf")},
        {"jitter": 7},
        {"jitter": float("nan")},
        {"grey": -0.1},
        {"blur": 2},
        {"side": 0},
        {"side": 1.5},
    ],
)
def test_bad_options(options):
    with pytest.raises(UserError, match=f"{next(iter(options))} is .*: use"):
        StrongViews(**options)


@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.short])
def test_views_are_of_stored_images(change):
    with pytest.raises(UserError, match="uint8"):
        StrongViews()(change(random_images(4)), generator())


@pytest.mark.parametrize(("side", "height", "width"), [(0.75, 24, 30), (0.5, 16, 20), (0.01, 1, 1)])
def test_small_views_show_the_same_crops(side, height, width):
    images = random_images(6, size=40)[:, :, :32]
    small, whole = (StrongViews(jitter=0, grey=0, blur=0, side=s)(images, generator()) for s in (side, 1.0))
    assert small.shape == (6, 3, height, width)
    if side == 0.5:  # each pixel of a view of half the side lies between four of the whole one
        assert torch.allclose(small.mean((2, 3)), whole.mean((2, 3)), atol=0.1)


def test_without_the_flip_no_view_is_mirrored():
    draws = [StrongViews(flip=flip).draw((64, 3, 16, 16), torch.Generator().manual_seed(0)) for flip in (True, False)]
    mirrored, plain = (draw.crop[:, 0, 0] for draw in draws)
    assert (mirrored < 0).any()
    assert (plain > 0).all()


# ----------------------------------------------------------------------------------------------------------------------
# Views of a researcher, and the weak views.


def crops(images, generator):
    """One function: a shift of a few pixels, the same for all."""
    n = int(torch.randint(1, 4, (), generator=generator))
    return images.roll(n, -1) / 255


def noisy(images, generator):
    """It draws from torch's global generator, as transforms of torchvision do."""
    return (images / 255 + 0.1 * torch.randn(images.shape)).clamp(0, 1)


class Drawing:
    def __init__(self):
        self.generator = torch.Generator()

    def __call__(self, images, generator):
        return crops(images, self.generator)


OWN = {"crops": crops, "noisy": noisy, "strong": "strong", "strong, options": "strong?blur=0.5&strength=1"}


def learner_with(views, seed=3, **options):
    torch.manual_seed(0)
    return Learner(resnet18(4, norm="group"), RandomReplace(), 8, views=views, seed=seed, device="cpu", **options)


def learn(learner, n_steps, first=0):
    return [learner.learn_many(random_images(8, seed=first + step)).loss for step in range(n_steps)]


@pytest.mark.parametrize("views", OWN.values(), ids=OWN.keys())
def test_any_views_resume_bit_by_bit_and_leave_the_global_generator_alone(views):
    learner, other = learner_with(views), learner_with(views, seed=99)
    learn(learner, 2)
    other.load_state_dict(learner.state_dict())
    drawn = torch.get_rng_state()
    ahead = learn(learner, 3, first=2)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.manual_seed(77)
    assert learn(other, 3, first=2) == ahead


@pytest.mark.parametrize("views", OWN.values(), ids=OWN.keys())
def test_any_views_are_the_same_in_chunks(views):
    learners = [learner_with(views) for _ in range(2)]
    learners[1].plan = MemoryPlan(3, 0)
    losses = [learn(learner, 2) for learner in learners]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_views_that_are_made_all_at_once_count_in_the_memory_plan():
    peaks = [learner_with(views, memory="4G").fit((8, 3, 64, 64)).peak for views in ("strong", crops)]
    assert peaks[1] - peaks[0] > 16 * 3 * 64 * 64 * 4 - 2**20  # 16 views of floats, but for what the process has grown


@pytest.mark.parametrize(
    ("views", "told"),
    [
        (lambda images, generator: images, r"the views are torch.uint8 of shape \(16, 3, 16, 16\): return float"),
        (lambda images, generator: images.float(), "the views have values up to 255: return float images in"),
        (lambda images, generator: images[:3] / 255, r"of shape \(3, 3, 16, 16\): return float .*16 x 3"),
        (lambda images, generator: images.numpy(), "the views are a ndarray"),
        ("stong", "no views 'stong': did you mean 'strong'"),
        ("strong?scale=0.3", "option scale is '0.3', and cannot be given as text"),
        (StrongViews, r"give a function of images and a generator, as StrongViews\(\)"),
        (3, "views is 3: give a function"),
        (Drawing(), "the views Drawing hold a random generator of their own: draw from the one that they are called"),
    ],
)
def test_what_cannot_be_views(views, told):
    with pytest.raises(UserError, match=told):
        learn(learner_with(views), 1)


def test_views_by_name_take_what_the_recipe_says():
    device = Learner(resnet18(4), recipe="device", device="cpu", views="strong?jitter=0.5")
    assert (device.views.scale, device.views.side, device.views.flip, device.views.jitter) == (
        (0.2, 1),
        0.75,
        True,
        0.5,
    )


@pytest.mark.parametrize("name", WEAK_VIEWS)
def test_weak_views(name, model):
    images = random_images(5, 24)
    weak = build_weak_view(name)
    for x in (images, images / 255):
        assert weak(x).shape == x.shape
        assert weak(x).dtype == x.dtype
        assert torch.equal(weak(x), weak(x))
        assert not torch.equal(weak(x), x)
        assert torch.equal(weak(x)[2:3], weak(x[2:3]))  # each image by itself
    score = contrast_score(model, images, weak_view=weak)
    assert ((score >= 0) & (score <= 2)).all()
    assert (torch.equal(score, contrast_score(model, images))) == (name == "flip")
    model.weak_view = weak
    assert torch.equal(contrast_score(model, images), score)


def test_a_shift_moves_what_it_shows_to_the_right():
    image = torch.arange(8, dtype=torch.uint8).expand(1, 3, 8, 8)
    assert build_weak_view("shift?share=0.25")(image)[0, 0, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert build_weak_view("shift")(image)[0, 0, 0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("weak_view", [*WEAK_VIEWS, lambda x: x.flip(-1, -2)])
def test_the_score_of_a_learner_is_by_its_weak_view(weak_view):
    learner = Learner(resnet18(4), ContrastScoring(), 8, weak_view=weak_view, device="cpu")
    images = random_images(8)
    expected = contrast_score(learner.model, images, weak_view=build_weak_view(weak_view))
    learner.learn_many(images)
    assert torch.equal(learner.buffer.scores, expected)


@pytest.mark.parametrize(
    ("weak_view", "told"),
    [
        ("flop", "no weak view 'flop': did you mean 'flip'"),
        ("shift?share=2", "share is 2.0: use a share of the image's width"),
        (lambda x: x[..., 1:], r"the weak view is torch.float32 of shape \(.*, 15\): return torch.float32 of"),
        (lambda x: None, "the weak view is a NoneType"),
        (5, "weak_view is 5: give a function of images"),
    ],
)
def test_what_cannot_be_a_weak_view(weak_view, told):
    with pytest.raises(UserError, match=told):
        learn(Learner(resnet18(4), ContrastScoring(), 8, weak_view=weak_view, device="cpu"), 1)
