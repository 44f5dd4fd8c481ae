from functools import partial

import pytest
import torch
from torch import nn

from streamclr import Learner, UserError, compact, open_stream, resnet18, resnet34, resnet50
from streamclr.buffer import Buffer
from streamclr.encoders.architecture import RESNETS, Architecture
from streamclr.encoders.inference import infer, infer_views
from streamclr.encoders.mobilenet import mobilenet_v2
from streamclr.encoders.projection import ContrastiveModel, count_features
from streamclr.encoders.resnet import STEMS, BasicBlock, Conv3x3, ResNet
from streamclr.policy import POLICIES
from streamclr.runs.evaluation import curve_point
from support.images import make_folder, random_images


@pytest.mark.parametrize(
    ("make", "n_parameters"), [(resnet18, 11_176_512), (resnet34, 21_284_672), (resnet50, 23_508_032)]
)
def test_parameters_are_those_of_torchvision_without_its_classifier(make, n_parameters):
    encoder = make(stem="imagenet")
    assert sum(p.numel() for p in encoder.parameters()) == n_parameters


def test_resnet18_has_torchvisions_names():
    names = ["conv1.weight"]

    def norm(prefix):
        return [f"{prefix}.{key}" for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]

    names += norm("bn1")
    for layer in range(1, 5):
        for block in range(2):
            prefix = f"layer{layer}.{block}"
            names += [
                f"{prefix}.conv1.weight",
                *norm(f"{prefix}.bn1"),
                f"{prefix}.conv2.weight",
                *norm(f"{prefix}.bn2"),
            ]
            if layer > 1 and block == 0:
                names += [f"{prefix}.downsample.0.weight", *norm(f"{prefix}.downsample.1")]
    assert sorted(resnet18().state_dict()) == sorted(names)


@pytest.mark.parametrize("make", [resnet18, resnet34, resnet50])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("stem", "side"), [("small", 16), ("half", 32), ("imagenet", 64)])
def test_maps_images_to_features(make, norm, stem, side):
    encoder = make(width=4, stem=stem, norm=norm)
    features = encoder(torch.rand(2, 3, side, side))
    assert features.shape == (2, encoder.n_features)
    assert encoder.n_features == 32 * (4 if make is resnet50 else 1)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("width", "side"), [(2, 8), (5, 32), (32, 64)])
def test_compact_maps_images_of_any_size_to_features(width, norm, side):
    encoder = compact(width, norm)
    assert encoder(torch.rand(2, 3, side, side)).shape == (2, encoder.n_features) == (2, 4 * width)


def test_the_blocks_of_compact_are_all_that_it_computes():
    encoder = compact(4)
    in_blocks = {id(part) for block in encoder.blocks for pair in block.path for part in pair}
    assert in_blocks == {id(m) for m in encoder.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)}
    assert [len(stage) for stage in encoder.stages] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"width": 1}, "width is 1: use at least 2"),
        ({"width": 0}, "width is 0"),
        ({"norm": "layer"}, "norm is 'layer'"),
    ],
)
def test_bad_options_of_compact(options, why):
    with pytest.raises(UserError, match=why):
        Architecture.resolve("compact", 32, **options).make()


def test_compact_has_no_choice_of_stem():
    with pytest.raises(UserError, match="stem is small, and compact has no choice of it: leave it out"):
        Architecture.resolve("compact", 32, stem="small")


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_architecture_of_compact_is_found_in_a_model(norm):
    asked = Architecture.resolve("compact", 32, width=6, norm=norm)
    assert Architecture.of(asked.make_model()) == asked == ("compact", 6, None, norm, "batchnorm")
    assert str(asked) == f"a compact of width 6 with {norm} norm"
    assert asked.usual_init == "random"


@pytest.mark.parametrize("width", [1, 3, 8, 20, 56, 64])
def test_group_norm_divides_any_width(width):
    assert resnet18(width=width, norm="group")(torch.rand(1, 3, 16, 16)).shape == (1, 8 * width)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("width", [1, 4, 12])
def test_gradients_of_narrow_encoders(width, norm):
    """Against double precision, whose convolutions are others: some of oneDNN's are wrong for few channels."""
    torch.manual_seed(0)
    encoder = resnet18(width, norm=norm)
    views = torch.rand(16, 3, 16, 16)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        encoder.to(dtype).zero_grad()
        encoder(views.to(dtype)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten().double() for p in encoder.parameters()]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99999


WITH_GROUP_NORM = (partial(make, width=8, norm="group") for make in (resnet18, resnet50, compact))


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("make", [partial(resnet18, 8), partial(resnet50, 8), compact, mobilenet_v2, *WITH_GROUP_NORM])
def test_every_layer_computes_channels_last_in_training_and_inference(make, in_bf16):
    model = ContrastiveModel(make())
    model.in_bf16, seen = in_bf16, set()

    def look(module, inputs, output):
        if output.ndim == 4:
            seen.add((model.training, output.is_contiguous(memory_format=torch.channels_last), output.dtype))

    for module in model.encoder.modules():
        if not list(module.children()):
            module.register_forward_hook(look)
    model(random_images(4, 40) / 255)
    infer(model, random_images(4, 40))
    assert seen == {(True, True, torch.bfloat16 if in_bf16 else torch.float32), (False, True, torch.float32)}


def test_small_stem_keeps_the_resolution():
    sizes = []
    encoder = resnet18(width=4)
    encoder.layer1.register_forward_hook(lambda module, args, out: sizes.append(out.shape[-1]))
    encoder(torch.rand(1, 3, 32, 32))
    assert sizes == [32]


def test_projections_are_unit_vectors(model):
    z = model(torch.rand(7, 3, 16, 16))
    assert z.shape == (7, 128)
    assert torch.allclose(z.norm(dim=1), torch.ones(7), atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.head)


def test_any_module_can_be_the_encoder():
    conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    assert [count_features(encoder) for encoder in (conv, flat)] == [6, 5]
    assert conv[1].num_batches_tracked == 0
    assert ContrastiveModel(flat)(torch.rand(4, 3, 16, 16)).shape == (4, 128)
    odd = nn.Sequential(nn.Flatten(), nn.Linear(3 * 17 * 17, 5))
    with pytest.raises(UserError, match="n_features"):
        ContrastiveModel(odd)
    for depends_on_size in (nn.Flatten(), nn.Conv2d(3, 2, 3)):
        with pytest.raises(UserError, match="depends on the size"):
            count_features(depends_on_size)
    odd.n_features = 5
    assert ContrastiveModel(odd)(torch.rand(4, 3, 17, 17)).shape == (4, 128)


def test_infer_restores_the_mode_after_an_error(model):
    with pytest.raises(RuntimeError):
        infer(model, torch.zeros(2, 5, 16, 16, dtype=torch.uint8))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("options", [{"width": 0}, {"stem": "tiny"}, {"norm": "layer"}])
def test_bad_options(options):
    with pytest.raises(UserError, match=str(next(iter(options.values())))):
        resnet18(**options)


def test_a_3x3_convolution_of_one_pixel_is_its_centre():
    conv = Conv3x3(5, 7)
    x = torch.randn(3, 5, 1, 1)
    assert torch.allclose(conv(x), torch.nn.functional.conv2d(x, conv.weight, padding=1), atol=1e-6)
    x = torch.randn(3, 5, 2, 1)
    assert torch.equal(conv(x), torch.nn.functional.conv2d(x, conv.weight, padding=1))


@pytest.mark.parametrize("encoder", RESNETS)
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_an_architecture_is_found_in_its_encoder(encoder, stem, norm):
    asked = Architecture(encoder, 3, stem, norm)
    before = torch.get_rng_state()
    with torch.device("meta"):
        made = asked.make_model()
    assert Architecture.of(made) == asked
    assert torch.equal(torch.get_rng_state(), before)


def test_no_architecture_of_other_encoders():
    odd = ResNet(BasicBlock, (1, 1, 1, 1), width=2)
    flat = torch.nn.Flatten()
    flat.n_features = 8
    for encoder in (odd, flat):
        with pytest.raises(UserError, match="use resnet18, resnet34, resnet50"):
            Architecture.of(ContrastiveModel(encoder))


class Returns(nn.Module):
    def __init__(self, function, n_features=None):
        super().__init__()
        self.function, self.n_features = function, n_features

    def forward(self, x):
        return self.function(x.mean((2, 3)))


@pytest.mark.parametrize("n_features", [None, 3])
@pytest.mark.parametrize("wrap", [lambda h: {"features": h}, lambda h: (h, h), lambda h: None])
def test_an_encoder_that_returns_no_tensor_is_told(wrap, n_features):
    with pytest.raises(UserError, match=r"the encoder returns a (dict|tuple|NoneType): return"):
        Learner(Returns(wrap, n_features), buffer=4, device="cpu").learn_many(random_images(4))


def test_an_encoder_with_another_number_of_features_is_told():
    with pytest.raises(UserError, match=r"the encoder returns features of \(4, 3\).*n_features is 5"):
        ContrastiveModel(Returns(lambda h: h, 5))(torch.rand(4, 3, 8, 8))


@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.short, lambda x: x / 255])
def test_stored_images_are_uint8(model, change):
    with pytest.raises(UserError, match="uint8"):
        infer(model, change(random_images(4)))


def test_views_go_through_the_model_as_they_are(model):
    images = random_images(5)
    assert torch.equal(infer_views(model, images / 255), infer(model, images))
    with pytest.raises(UserError, match="float"):
        infer_views(model, images)


@pytest.mark.parametrize("policy", ["contrast", "selective-bp", "k-center", "min-red", "scale"])
def test_at_224_px_a_policy_takes_few_images_at_once(policy):
    seen = []
    model = ContrastiveModel(Returns(lambda h: seen.append(len(h)) or h, 3))
    buffer = Buffer(20)
    POLICIES[policy]().keep(buffer.pool(random_images(40, 224)), 20, model)
    assert max(seen) == (32 if policy == "contrast" else 16)  # an image and its mirror image go together


def test_at_224_px_probes_take_few_images_at_once(tmp_path):
    seen = []
    model = ContrastiveModel(Returns(lambda h: seen.append(len(h)) or h, 3))
    source = open_stream(f"folder:{make_folder(tmp_path)}", size=224).source
    curve_point(model, source.train, source.test)
    assert max(seen) == 16


@pytest.mark.parametrize(("size", "n"), [(16, 256), (32, 64), (96, 16), (224, 16)])
def test_images_at_once(size, n):
    """Measured on one thread with a ResNet-18 of width 16; a memory limit makes it fewer, never more."""
    seen = []
    encoder = Returns(lambda h: seen.append(len(h)) or h, 3)
    infer(encoder, random_images(n + 3, size))
    assert max(seen) == n
    encoder.max_chunk = 2
    seen.clear()
    infer(encoder, random_images(5, size))
    assert max(seen) == 2
