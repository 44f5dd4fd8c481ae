import pytest
import torch

from streamclr.scenes import draw_neighbours, find_scenes, find_scenes_in, spread
from support.images import random_images


def shots(n_shots=4, n_frames=6, size=16):
    """Shots of one picture each, with a little noise."""
    pictures = random_images(n_shots, 4, seed=1).repeat_interleave(size // 4, 2).repeat_interleave(size // 4, 3)
    frames = pictures.repeat_interleave(n_frames, 0).int()
    noise = torch.randint(-3, 4, frames.shape, generator=torch.Generator().manual_seed(0))
    return (frames + noise).clamp(0, 255).byte()


def test_cuts_are_found_in_pixels_and_in_features():
    images = shots()
    expected = torch.arange(4).repeat_interleave(6)
    assert torch.equal(find_scenes(images), expected)
    assert torch.equal(find_scenes_in(images.flatten(1).float()), expected)


def test_a_scene_never_spans_two_cameras():
    images = shots(1, 8)
    cameras = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    assert torch.equal(find_scenes(images, cameras), cameras)


def test_equal_frames_of_one_colour_are_one_scene():
    assert find_scenes(torch.full((5, 3, 16, 16), 7, dtype=torch.uint8)).tolist() == [0] * 5


@pytest.mark.parametrize("reach", [1, 3, 30])
def test_neighbours_are_others_of_the_scene_within_reach(reach):
    scenes = torch.tensor([5] * 8 + [2] + [5] * 4)  # the same number again is another scene
    parts = torch.tensor([0] * 8 + [1] + [2] * 4)
    generator, index = torch.Generator().manual_seed(0), torch.arange(13)
    seen = torch.zeros(13, 13)
    for _ in range(400):
        drawn = draw_neighbours(scenes, generator, reach)
        seen[index, drawn] += 1
    allowed = (parts[:, None] == parts) & ((index[:, None] - index).abs() <= reach) & (index[:, None] != index)
    allowed[8, 8] = True  # alone: its own
    assert torch.equal(seen > 0, allowed)
    shares = seen / allowed.sum(1, keepdim=True).reciprocal() / 400
    assert (shares[allowed] - 1).abs().max() < 0.75  # uniform


def test_a_label_spreads_to_the_nearest_frames_of_its_scene():
    scenes = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2])
    rows, sources = spread(torch.tensor([1, 5, 7]), scenes)
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sources.tolist() == [1, 1, 1, 1, 5, 5, 7, 7]
    rows, sources = spread(torch.tensor([1]), scenes, reach=2)
    assert rows.tolist() == [0, 1, 2, 3]
