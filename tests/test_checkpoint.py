import json

import pytest
import torch
from safetensors.torch import save_file

from streamclr import UserError, resnet18
from streamclr.checkpoint import json_line, load_encoder, load_tensors, load_weights, save_tensors, write_json
from streamclr.encoder import ContrastiveModel


def test_json_has_no_nan_and_no_leftovers(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("nan"), "y": [1, float("inf")], 3: (2.5,)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [1, None], "3": [2.5]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json_line({"a": float("-inf")}) == '{"a": null}\n'


def test_tensors_round_trip(tmp_path):
    tensors = {"a": torch.rand(3, 2).T, "b": torch.arange(4)}
    save_tensors(tmp_path / "t.safetensors", tensors)
    read = load_tensors(tmp_path / "t.safetensors")
    assert all(torch.equal(read[key], tensors[key]) for key in tensors)


def test_public_weights_load_with_and_without_their_classifier(tmp_path):
    source, target = resnet18(width=4, stem="imagenet"), resnet18(width=4, stem="imagenet")
    weights = dict(source.state_dict()) | {"fc.weight": torch.zeros(1000, 32), "fc.bias": torch.zeros(1000)}
    save_file(weights, tmp_path / "w.safetensors")
    load_encoder(target, tmp_path / "w.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )
    old = {key: value for key, value in weights.items() if "num_batches" not in key}
    save_file(old, tmp_path / "old.safetensors")
    load_encoder(resnet18(width=4, stem="imagenet"), tmp_path / "old.safetensors")


def test_a_runs_own_weights_load_as_an_encoder(tmp_path):
    model, target = ContrastiveModel(resnet18(width=4)), resnet18(width=4)
    save_tensors(tmp_path / "model.safetensors", model.state_dict())
    load_encoder(target, tmp_path / "model.safetensors")
    assert torch.equal(target.conv1.weight, model.encoder.conv1.weight)


def test_a_mismatch_is_listed_by_key_and_nothing_is_loaded(tmp_path):
    weights = dict(resnet18(width=4, stem="imagenet").state_dict())
    del weights["bn1.bias"]
    weights["extra"] = torch.zeros(1)
    save_file(weights, tmp_path / "w.safetensors")
    target = resnet18(width=4)
    before = target.bn1.weight.clone()
    with pytest.raises(UserError, match="does not fit") as error:
        load_encoder(target, tmp_path / "w.safetensors")
    for part in ("bn1.bias is missing", "extra is not known", "conv1.weight is [4, 3, 7, 7], not [4, 3, 3, 3]"):
        assert part in str(error.value)
    assert torch.equal(target.bn1.weight, before)


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 64])
def test_files_that_are_no_safetensors(tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"w\.safetensors is not a whole safetensors file"):
        load_tensors(tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="no file"):
        load_tensors(tmp_path / "missing")


def test_load_weights_lists_every_key():
    with pytest.raises(UserError) as error:
        load_weights(resnet18(width=4), {}, "nothing")
    assert str(error.value).count("is missing") == 100  # all but the counters of old weights
