"""Encoders of other libraries: tiny models of transformers, a module of one's own, and a stand-in for timm."""

import json
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from streamclr import Learner, UserError
from streamclr.base.tensors import load_tensors, load_weights
from streamclr.cli.entry import main
from streamclr.encoders.architecture import Architecture
from streamclr.encoders.projection import IMAGENET_MEAN
from streamclr.encoders.public import make_adapter, short_name
from streamclr.encoders.weights import get, make_encoder
from streamclr.fleet.options import SHARED, learner_options
from streamclr.fleet.rounds import Rounds
from streamclr.models.export import export
from streamclr.models.pretrained import Pretrained
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.assemble import make_learner
from support.images import random_images
from support.runs import made_run, run_plan

VIT = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "patch_size": 8}
CONFIGS = {
    "ResNetConfig": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "ConvNextConfig": {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "MobileNetV2Config": {"depth_multiplier": 0.25},
    "ViTConfig": VIT | {"image_size": 32},
    "Dinov2Config": VIT | {"image_size": 32, "mlp_ratio": 2},
    "DINOv3ViTConfig": VIT | {"image_size": 32},  # has buffers that no state dict holds
    "BertConfig": {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
}
VISION = [name for name in CONFIGS if name != "BertConfig"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes the directory of a model with random weights, once."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")

    def save(name):
        if not (root / name).exists():
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(getattr(transformers, name)(**CONFIGS[name]))
            model.save_pretrained(root / name)
            torch.save(model.state_dict(), root / name / "state.pth")
        return root / name

    return save


@pytest.mark.parametrize("name", VISION)
def test_a_model_of_transformers_learns_and_comes_back(name, saved):
    model = make_encoder(f"hf:{saved(name)}", 32)
    weights, own = torch.load(saved(name) / "state.pth"), model.encoder.model.state_dict()
    assert all(torch.equal(own[key], weights[key]) for key in own)  # none of them is random
    learner = Learner(model, buffer=8, device="cpu")
    learner.learn_many(random_images(8))
    assert not all(torch.equal(own[key], weights[key]) for key in own)
    before, states = learner.extractor()(random_images(4)), torch.get_rng_state()
    with torch.device("meta"):
        again = Architecture.resolve(f"hf:{saved(name)}", 32).make_model()
    load_weights(again, learner.model.state_dict(), "the learner", assign=True)
    assert torch.equal(Learner(again, buffer=8, device="cpu").extractor()(random_images(4)), before)
    assert torch.equal(torch.get_rng_state(), states)  # a step under way would draw other numbers


def test_features_are_the_pooled_output(saved):
    images = torch.rand(2, 3, 32, 32)
    for name, pooled in (
        ("ResNetConfig", lambda out: out.last_hidden_state.mean((2, 3))),
        ("Dinov2Config", lambda out: out.pooler_output),
        ("ViTConfig", lambda out: out.last_hidden_state[:, 0]),  # its pooler is often missing in public weights
    ):
        encoder = make_adapter(f"hf:{saved(name)}", pretrained=True).eval()
        assert torch.allclose(encoder(images), pooled(encoder.model(images)), atol=1e-6)


def test_a_classifier_without_pooler_is_a_start(saved, tmp_path):
    """Most public ViTs are saved so: a pooler with random weights would spoil their features."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**CONFIGS["ViTConfig"])
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    encoder = make_adapter(f"hf:{tmp_path / 'vit'}", pretrained=True)
    assert not any("pooler" in key for key in encoder.state_dict())


def test_standardised_as_its_files_say(saved, tmp_path):
    place = tmp_path / "model"
    place.symlink_to(saved("ResNetConfig"))
    assert make_encoder(f"hf:{place}", 32).mean.flatten().tolist() == pytest.approx(IMAGENET_MEAN)
    file = saved("ResNetConfig") / "preprocessor_config.json"
    for content, expected in (
        ({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}, ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])),
        ({"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, ([0] * 3, [1] * 3)),
    ):
        file.write_text(json.dumps(content))
        model = make_encoder(f"hf:{place}", 32)
        assert model.mean.flatten().tolist() == pytest.approx(expected[0])
        assert model.std.flatten().tolist() == pytest.approx(expected[1])
    file.unlink()


def check_told(name, told, size=32, **options):
    with pytest.raises(UserError, match=told) as error:
        make_encoder(name, size, **options)
    assert "\n" not in str(error.value)


def test_what_is_no_vision_model(saved, tmp_path):
    check_told(f"hf:{saved('BertConfig')}", "BertModel, which takes no images: use a vision model")
    check_told(f"hf:{tmp_path}", "no model of transformers: .* has no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    check_told(f"hf:{tmp_path}", "cannot read hf:")
    (tmp_path / "config.json").write_text((saved("ViTConfig") / "config.json").read_text())
    check_told(f"hf:{tmp_path}", r"no file named model\.safetensors")
    torch.save({}, tmp_path / "pytorch_model.bin")  # a pickle is not read
    check_told(f"hf:{tmp_path}", r"no file named model\.safetensors")
    assert make_encoder(f"hf:{tmp_path}", 32, "random").n_features == 16
    check_told("hf:no such name", "no directory, and no name on Hugging Face's hub: write hf:OWNER/NAME")


def test_remote_code_is_never_run(saved, tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('executed')")
    check_told(f"hf:{tmp_path}", "cannot read hf:")


def test_weights_that_are_missing_are_listed(saved, tmp_path):
    from safetensors.torch import save_file

    tensors = load_tensors(saved("ConvNextConfig") / "model.safetensors")
    del tensors["layernorm.bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((saved("ConvNextConfig") / "config.json").read_text())
    check_told(f"hf:{tmp_path}", r"has no weights for layernorm\.bias: it would start from random ones")


def test_a_size_that_the_model_refuses(saved):
    check_told(f"hf:{saved('ConvNextConfig')}", r"takes no images of 3 px .*: give --size, 32, 64, .* would do", size=3)


def test_without_a_network(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    check_told("hf:facebook/dinov2-small", r"cannot get hf:facebook/dinov2-small .*: connect to the hub, or .* hf:DIR")


def test_a_name_on_the_hub_from_its_cache(saved, monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--some--resnet"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("c" * 40)
    (model / "snapshots").mkdir()
    (model / "snapshots" / ("c" * 40)).symlink_to(saved("ResNetConfig"))
    assert "hf:some/resnet is here" in get("hf:some/resnet")
    assert make_encoder("hf:some/resnet", 32).n_features == 16


def test_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "timm", None)
    check_told("hf:microsoft/resnet-18", r"needs transformers .*\.\[hf\]")
    check_told("timm:resnet18", "needs timm .*pip install timm")


def small(**kwargs):
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_timm(monkeypatch):
    """A stand-in: timm needs torchvision."""
    asked = []

    def create_model(name, pretrained, num_classes):
        asked.append((name, pretrained, num_classes))
        if name != "tiny":
            raise RuntimeError(f"Unknown model ({name})\nmore lines")
        model = small()
        model.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "input_size": (3, 64, 64)}
        return model

    timm = ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = make_encoder("timm:tiny", 32)
    assert (model.n_features, model.mean[0], model.std[0]) == (6, 0.5, 0.25)
    with torch.device("meta"):
        Architecture.resolve("timm:tiny", 32).make_model()
    assert asked == [("tiny", True, 0), ("tiny", False, 0)]
    check_told("timm:tinny", r"cannot make timm:tinny \(Unknown model \(tinny\)\): timm.list_models")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A package of one's own."""
    (tmp_path / "path" / "mine").mkdir(parents=True)
    (tmp_path / "path" / "mine" / "__init__.py").touch()
    (tmp_path / "path" / "mine" / "broken.py").write_text("import no_such_module_at_all")
    (tmp_path / "path" / "mine" / "nets.py").write_text(
        "import torch\nfrom torch import nn\nn_called = 0\n"
        "def net():\n"
        "    global n_called\n    n_called += 1\n"
        "    conv = nn.Conv2d(3, 5, 8, 8)\n    nn.init.constant_(conv.weight, 0.25)\n"
        "    return nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "def number():\n    return 7\n"
        "def needs(x):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "path")
    yield
    for name in ("mine", "mine.nets", "mine.broken"):
        sys.modules.pop(name, None)


def test_a_function_of_ones_own(mine):
    model = make_encoder("mine.nets:net", 32)
    assert model.n_features == 5
    assert (model.encoder[0].weight == 0.25).all()  # what the function returned
    before = torch.get_rng_state()
    with torch.device("meta"):
        again = Architecture.resolve("mine.nets:net", 32).make_model()
    assert torch.equal(torch.get_rng_state(), before)
    load_weights(again, model.state_dict(), "the model", assign=True)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere.nets:net", "no module nowhere for the encoder nowhere.nets:net: .*PYTHONPATH"),
        ("mine.nots:net", "no module mine.nots"),
        ("mine.nets:not", "mine.nets has no function not"),
        ("mine.nets:n_called", "mine.nets has no function n_called"),
        ("mine.nets:number", "returns a int: return a torch.nn.Module"),
        ("mine.nets:needs", "cannot be called without arguments"),
        (":net", "write hf:NAME_OR_DIR, timm:NAME or package.module:function"),
        ("hf:", "write hf:NAME_OR_DIR, timm:NAME or package.module:function"),
        ("mobilenet", "no encoder 'mobilenet': did you mean 'mobilenet_v2'.*package.module:function"),
    ],
)
def test_a_function_that_cannot_be_used(mine, name, told):
    check_told(name, told)


def test_a_mistake_in_ones_own_module_is_shown(mine):
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        make_encoder("mine.broken:net", 32)


def test_a_size_that_ones_own_encoder_refuses(mine):
    check_told("mine.nets:net", "mine.nets:net takes no images of 4 px .* 32, 64, 96, 128, 224 would do", size=4)


def test_options_of_a_resnet_are_refused(mine):
    for option in ({"width": 8}, {"stem": "small"}, {"norm": "group"}):
        with pytest.raises(UserError, match=r"mine\.nets:net has no choice of it"):
            Architecture.resolve("mine.nets:net", 32, **option)


# ----------------------------------------------------------------------------------------------------------------------
# What works in a run, and what is refused at its start.


def test_a_run_predicts_and_resumes(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(saved("ConvNextConfig").parent)
    words = ["run", "--source", "synthetic:?train=20&test=20", "--size", "32", "--images", "32", "--buffer", "8"]
    words += ["--probes", "0", "--fractions", "1", "--encoder", "hf:ConvNextConfig", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    monkeypatch.chdir(tmp_path)  # the plan has the whole path
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert content["encoder"] == f"hf:{saved('ConvNextConfig')}"
    assert (content["init"], content["width"], content["projection"]) == ("pretrained", None, "batchnorm")
    capsys.readouterr()
    assert main(["predict", "run", "--source", "synthetic:", "--images", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    tuned = run_plan(encoder=content["encoder"], stem=None, init=str(tmp_path / "run" / "model.safetensors"))
    ours, theirs = make_learner(tuned).encoder.state_dict(), RunDirectory(tmp_path / "run").load_model()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.encoder.state_dict().items())


def test_a_memory_limit_needs_a_model_without_batchnorm(saved):
    def learner(name, projection):
        return make_learner(run_plan(encoder=f"hf:{saved(name)}", stem=None, memory="8G", projection=projection))

    for projection in ("plain", "batchnorm"):  # the head takes all features at once
        learner("ViTConfig", projection).learn_many(random_images(8))
    with pytest.raises(UserError, match="memory is given, and the encoder has BatchNorm"):
        learner("ResNetConfig", "plain")


@pytest.mark.parametrize("guards", ["on", "off"])
def test_fast_scoring_is_refused(mine, guards):
    plan = run_plan(encoder="mine.nets:net", stem=None, policy="contrast?precision=int8", guards=guards)
    with pytest.raises(UserError, match="cannot be scored in 'int8': use auto, fp32"):
        make_learner(plan)


def test_a_fleet_takes_streamclrs_own_encoders(mine, tmp_path):
    import mine.nets

    options = {"statistics": "shared", "momentum": 0.0, "slow": 0.0, "round_images": 8}
    with pytest.raises(UserError, match=r"a fleet has one of streamclr's own encoders, not 'mine\.nets:net'"):
        Rounds(tmp_path / "fleet", RunOptions(encoder="mine.nets:net"), options)
    sent = {name: getattr(RunOptions(), name) for name in SHARED} | {"encoder": "mine.nets:net"}
    with pytest.raises(UserError, match=r"a fleet has one of streamclr's own encoders, not 'mine\.nets:net'"):
        learner_options(sent, {})
    assert mine.nets.n_called == 0  # a server cannot make a device call anything


def test_formats_that_build_the_encoder_by_name_are_refused(mine, tmp_path):
    directory = made_run(tmp_path / "run", encoder="mine.nets:net", width=None, stem=None)
    for format in ("torch", "pretrained"):
        with pytest.raises(UserError, match=f"{format} builds the encoder by its name, and mine.nets:net is not"):
            export(directory, format)
    with pytest.raises(UserError, match="--int8 is for streamclr's own encoders"):
        export(directory, "onnx", int8=True)
    model = directory.load_model()
    with pytest.raises(UserError, match="use resnet18"):
        Pretrained(model, nn.Module(), ["a"], 32)


@pytest.mark.system
@pytest.mark.parametrize("name", ["ResNetConfig", "ViTConfig"])
@pytest.mark.parametrize(("format", "package"), [("onnx", "onnxscript"), ("executorch", "executorch")])
def test_export_matches(name, format, package, saved, tmp_path):
    pytest.importorskip(package)
    directory = made_run(tmp_path / "run", size=48, encoder=f"hf:{saved(name)}", width=None, stem=None)
    file, parity = export(directory, format)
    assert parity.problem is None
    assert str(tmp_path).encode() not in file.read_bytes()  # nothing about the machine
    assert json.loads(file.with_name(f"{file.name}.json").read_text())["metadata"]["encoder"]["name"] == f"hf:{name}"


def test_short_names():
    assert short_name("hf:/home/me/models/vit") == "hf:vit"
    assert short_name("hf:owner/vit") == "hf:owner/vit"
    assert short_name("mine:net") == "mine:net"
