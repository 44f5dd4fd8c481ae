import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from streamclr.base.tensors import save_tensors
from streamclr.web.wall import COLUMNS, Wall, make_sheet
from support.images import random_images


def write(path, n=20, n_left=3, features=None, scored=True, guards=None, step=7):
    column = torch.arange(n, dtype=torch.long)
    tensors = {
        "images": random_images(n),
        "scores": 0.5 + column / 100 if scored else torch.full((n,), torch.nan),
        "ages": column % 4,
        "arrivals": 100 + column,
        "features": torch.randn(n, 8, generator=torch.Generator().manual_seed(0)) if features is None else features,
        "left_images": random_images(n_left, seed=1),
        "left_scores": torch.full((n_left,), 0.25 if scored else torch.nan),
        "left_ages": torch.ones(n_left, dtype=torch.long),
        "left_arrivals": torch.arange(n_left),
    }
    save_tensors(path / "buffer.safetensors", tensors, about=json.dumps({"step": step, "guards": guards or {}}))
    return tensors


def test_every_picture_is_in_its_place_of_the_sheet(tmp_path):
    tensors = write(tmp_path)
    wall = Wall(tmp_path, "contrast")
    assert wall.update()
    assert not wall.update()  # nothing new
    sheet = np.array(Image.open(io.BytesIO(wall.sheets[wall.version])))
    pictures = torch.cat([tensors["images"], tensors["left_images"]])
    side = wall.content["cell"]
    for i, picture in enumerate(pictures):
        y, x = i // COLUMNS * side, i % COLUMNS * side
        assert np.array_equal(sheet[y : y + side, x : x + side], picture.permute(1, 2, 0).numpy())
    assert wall.content["n"] == len(pictures)
    assert [cell["entered"] for cell in wall.content["cells"]] == [age % 4 == 0 for age in range(20)]
    assert wall.content["left"][2]["cell"] == 22


def test_an_empty_buffer_is_no_picture(tmp_path):
    save_tensors(tmp_path / "buffer.safetensors", {"images": torch.empty(0)})
    assert not Wall(tmp_path, "contrast").update()


@pytest.mark.parametrize(
    ("policy", "scored", "guards", "why"),
    [
        ("contrast", True, {}, "score 0.250; lowest score kept 0.500"),
        ("contrast", True, {"0": "blank"}, "removed by the guard against blank frames"),
        ("fifo", False, {}, "it was the oldest"),
        ("own", False, {}, "the policy preferred other images"),
    ],
)
def test_why_an_image_left(tmp_path, policy, scored, guards, why):
    write(tmp_path, scored=scored, guards=guards)
    wall = Wall(tmp_path, policy)
    wall.update()
    assert wall.content["left"][0]["why"] == why


def test_the_map_does_not_jump_when_the_features_turn_a_little(tmp_path):
    features = torch.randn(50, 8, generator=torch.Generator().manual_seed(3)) * torch.tensor([9.0, 8, 1, 1, 1, 1, 1, 1])
    wall, maps = Wall(tmp_path, "contrast"), []
    for turn in (1.0, -1.0, 1.0):  # signs of a principal component mean nothing
        write(tmp_path, 50, features=torch.cat([features[:, :1] * turn, features[:, 1:]], 1) * turn)
        wall._changed = 0
        wall.update()
        maps.append(np.array([[cell["x"], cell["y"]] for cell in wall.content["cells"]]))
    np.testing.assert_allclose(maps[0], maps[2], atol=0.05)
    assert abs(maps[0]).max() == 1


@pytest.mark.parametrize("features", [torch.zeros(5, 8), torch.ones(5, 1), torch.arange(5.0)[:, None], torch.eye(5)])
def test_a_map_of_anything(tmp_path, features):
    write(tmp_path, 5, features=features)
    wall = Wall(tmp_path, "contrast")
    assert wall.update()
    assert all(-1 <= cell[axis] <= 1 for cell in wall.content["cells"] for axis in "xy")
    json.dumps(wall.content, allow_nan=False)


def test_a_damaged_or_missing_file_shows_nothing_new(tmp_path):
    wall = Wall(tmp_path, "contrast")
    assert not wall.update()
    (tmp_path / "buffer.safetensors").write_bytes(b"half a")
    assert not wall.update()
    assert wall.content["picture"] is None


def test_large_pictures_are_made_small():
    sheet, side = make_sheet(random_images(3, 224))
    assert side == 56
    assert Image.open(io.BytesIO(sheet)).size == (16 * 56, 56)
