"""Encoders of other libraries by name: `hf:NAME_OR_DIR`, `timm:NAME` and `package.module:function`."""

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamclr.base import plugins
from streamclr.base.errors import UserError
from streamclr.base.extras import how_to_install
from streamclr.base.progress import quiet
from streamclr.encoders.inference import inference_mode

# What is read of a model on Hugging Face's hub: plain data, and no code.
HUB_FILES = ["config.json", "preprocessor_config.json", "model.safetensors", "model-*.safetensors"]
HUB_FILES += ["model.safetensors.index.json"]
SIZES_TO_TRY = (32, 64, 96, 128, 224)  # pixels


def is_adapter(name: str) -> bool:
    """Whether this names an encoder of another library, and not one of streamclr's own."""
    return ":" in name


def resolved_name(name: str) -> str:
    """The name that a plan holds: with the whole path of a directory; what cannot be a name is refused."""
    library, _, rest = name.partition(":")
    if not library or not rest:
        raise UserError(f"encoder is {name!r}: write hf:NAME_OR_DIR, timm:NAME or package.module:function")
    if library == "hf" and Path(rest).expanduser().is_dir():
        return f"hf:{Path(rest).expanduser().resolve()}"
    return name


def short_name(name: str) -> str:
    """For people and for exported files, which say nothing about this machine: without the path of a directory."""
    return f"hf:{Path(name[3:]).name}" if name.startswith("hf:/") else name


def make_adapter(name: str, pretrained: bool = False) -> nn.Module:
    """The encoder. On the meta device no weights are made, but for `package.module:function`.

    pretrained: with its public weights; else random ones, but for `package.module:function`, which has its own.
    """
    library, _, rest = name.partition(":")
    if library == "hf":
        return HuggingFaceEncoder(name, _with_real_buffers(lambda: _hugging_face(name, rest, pretrained)))
    if library == "timm":
        return _with_real_buffers(lambda: _timm(name, rest, pretrained))
    return _of_function(name) if torch.get_default_device().type != "meta" else _on_cpu(lambda: _of_function(name))


def _with_real_buffers(make: Callable[[], nn.Module]) -> nn.Module:
    """Buffers that are no part of a state dict, such as tables of positions, would stay on the meta device for ever."""
    module = make()
    if torch.get_default_device().type != "meta" or dict(module.named_buffers()).keys() <= module.state_dict().keys():
        return module
    return _on_cpu(make)


def _on_cpu(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        return make()


def check_takes(encoder: nn.Module, size: int, name: str) -> None:
    """An error if the encoder takes no images of this size."""
    try:
        _features_of_blank(encoder, size)
    except Exception as error:  # noqa: BLE001  each library has its own
        config = getattr(getattr(encoder, "model", None), "config", None)
        own = getattr(config, "image_size", None)
        sizes = {*SIZES_TO_TRY, own} if isinstance(own, int) else {*SIZES_TO_TRY}
        works = ", ".join(str(one) for one in sorted(sizes - {size}) if _takes(encoder, one))
        how = f"give --size, {works} would do" if works else "use another encoder"
        raise UserError(f"{name} takes no images of {size} px ({_line(error)}): {how}") from None


def _takes(encoder: nn.Module, size: int) -> bool:
    try:
        _features_of_blank(encoder, size)
    except Exception:  # noqa: BLE001  each library has its own
        return False
    return True


def _features_of_blank(encoder: nn.Module, size: int) -> Tensor:
    device = next((p.device for p in encoder.parameters()), torch.device("cpu"))
    with inference_mode(encoder), quiet(), torch.device(device):
        return encoder(torch.zeros(2, 3, size, size))


def _line(error: BaseException) -> str:
    """The first line of what another library says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(" .:")


# ----------------------------------------------------------------------------------------------------------------------
# Hugging Face: a vision model of `transformers`.


class HuggingFaceEncoder(nn.Module):
    """Standardised images to the pooled output of a vision model of `transformers`.

    image_mean, image_std: of the pre-processing that the model was trained with, where its files say so.
    """

    def __init__(self, name: str, model: Any):
        super().__init__()
        self.model: nn.Module = model
        if isinstance(getattr(getattr(model, "pooler", None), "dense", None), nn.Linear):
            model.pooler = None  # BERT's way; most public vision models come without its weights
        self.has_class_token = any(key.endswith("cls_token") for key in model.state_dict())
        interpolates = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        self.options = {"interpolate_pos_encoding": True} if interpolates else {}
        own = getattr(model.config, "image_size", None)
        for size in (own if isinstance(own, int) else 224, *SIZES_TO_TRY):
            if _takes(self, size):
                self.n_features = _features_of_blank(self, size).shape[1]
                break
        else:
            raise UserError(f"{name} is a {type(model).__name__}, which gives no features of an image: {USE_VISION}")
        if (scale := _image_scale(Path(model.config._name_or_path))) is not None:
            self.image_mean, self.image_std = scale

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(pixel_values=x, **self.options)
        if (pooled := getattr(out, "pooler_output", None)) is None:
            last = out.last_hidden_state  # n x channels x height x width, or n x tokens x channels
            pooled = last.mean((2, 3)) if last.ndim == 4 else last[:, 0] if self.has_class_token else last.mean(1)
        return pooled.flatten(1)


USE_VISION = "use a vision model, as microsoft/resnet-18 or facebook/dinov2-small"


def _hugging_face(name: str, place: str, pretrained: bool) -> nn.Module:
    try:
        with quiet():
            from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise UserError(f"{name} needs transformers ({_line(error)}): {how_to_install('hf')}") from None
    directory = Path(place) if Path(place).is_dir() else _from_hub(name, place)
    if not (directory / "config.json").is_file():
        raise UserError(f"{name} is no model of transformers: {directory} has no config.json")
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet(), _without_bars():
            config = AutoConfig.from_pretrained(directory, **options)
            with torch.device("meta"):  # what it is, before memory is taken for it
                kind = AutoModel.from_config(config, trust_remote_code=False)
            if "pixel_values" not in inspect.signature(kind.forward).parameters:
                raise UserError(f"{name} is a {type(kind).__name__}, which takes no images: {USE_VISION}")
            if not pretrained:
                return AutoModel.from_config(config, trust_remote_code=False, dtype=torch.float32)
            model, loaded = AutoModel.from_pretrained(
                directory, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **options
            )
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  transformers raises all kinds
        raise UserError(f"cannot read {name} ({_line(error)}): {USE_VISION}, with weights in safetensors") from None
    if missing := sorted(key for key in loaded["missing_keys"] if not key.startswith("pooler.dense.")):
        raise UserError(f"{name} has no weights for {', '.join(missing)}: it would start from random ones")
    return model.train()


def _from_hub(name: str, place: str) -> Path:
    """The model's files in the hub's cache, which are downloaded if they are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    elsewhere = "or get it elsewhere and give its directory, hf:DIR"
    try:
        try:
            return Path(snapshot_download(place, allow_patterns=HUB_FILES, local_files_only=True))
        except OSError:
            with quiet():
                return Path(snapshot_download(place, allow_patterns=HUB_FILES, etag_timeout=10))
    except HFValidationError:
        raise UserError(f"{place} is no directory, and no name on Hugging Face's hub: write hf:OWNER/NAME") from None
    except GatedRepoError:
        raise UserError(f"{name} asks to accept its terms: do so on its page, then run hf auth login") from None
    except RepositoryNotFoundError:
        raise UserError(f"no model {place} on Hugging Face's hub, or it is private: write hf:OWNER/NAME") from None
    except Exception as error:  # noqa: BLE001  of the HTTP library
        raise UserError(f"cannot get {name} ({_line(error)}): connect to the hub, {elsewhere}") from None


@contextmanager
def _without_bars() -> Iterator[None]:
    """Reading a file takes a moment; downloads have bars of their own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _image_scale(directory: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation of preprocessor_config.json; None if it does not say."""
    try:
        content = json.loads((directory / "preprocessor_config.json").read_text("utf-8"))
        if content.get("do_normalize") is False:
            return (0.0,) * 3, (1.0,) * 3
        mean, std = (tuple(float(value) for value in content[key]) for key in ("image_mean", "image_std"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return (mean, std) if len(mean) == len(std) == 3 and min(std) > 0 else None


# ----------------------------------------------------------------------------------------------------------------------
# timm, and a function of one's own.


def _timm(name: str, model_name: str, pretrained: bool) -> nn.Module:
    try:
        with quiet():
            timm = importlib.import_module("timm")
    except ImportError as error:
        raise UserError(f"{name} needs timm ({_line(error)}): pip install timm, which needs torchvision") from None
    try:
        with quiet():
            model = timm.create_model(model_name, pretrained=pretrained, num_classes=0)
    except Exception as error:  # noqa: BLE001  timm raises all kinds
        raise UserError(f"cannot make {name} ({_line(error)}): timm.list_models() shows the names") from None
    about = getattr(model, "pretrained_cfg", None) or {}
    if {"mean", "std"} <= about.keys():
        model.image_mean, model.image_std = tuple(about["mean"]), tuple(about["std"])
    size = (about.get("input_size") or (3, 224, 224))[-1]
    model.n_features = _features_of_blank(model, size).flatten(1).shape[1]
    return model


def _of_function(name: str) -> nn.Module:
    function = plugins.find("encoder", name, {})
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} cannot be called without arguments ({_line(error)}): give all a default") from None
    encoder = function()
    if not isinstance(encoder, nn.Module):
        raise UserError(f"{name} returns a {type(encoder).__name__}: return a torch.nn.Module, images to features")
    return encoder
