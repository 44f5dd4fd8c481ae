import numpy as np
import pytest

from streamclr import UserError, open_stream
from streamclr.streams.cameras.feed import make_feed
from streamclr.streams.stream import CameraStream


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_see_together_what_one_process_sees(n):
    """In each step the images of one segment of n times the size, in the order of the ranks; labels with them."""
    source = "synthetic:?size=8&stc=5"
    whole, shards = open_stream(source), [open_stream(source).shard(i, n, 4) for i in range(n)]
    for _ in range(3):
        arrivals, images = np.arange(whole.position, whole.position + 4 * n), whole.read(4 * n)
        parts = [shard.read(4) for shard in shards]
        assert np.array_equal(np.concatenate(parts), images)
        labels = [shard.source.labels(np.arange(shard.position - 4, shard.position)) for shard in shards]
        assert np.array_equal(np.concatenate(labels), whole.source.labels(arrivals))


def test_a_shard_ends_where_not_every_rank_has_a_whole_segment(tmp_path):
    from support.images import make_folder

    source = f"folder:{make_folder(tmp_path / 'images', n=11)}"  # 22 images: 5 segments of 4, and 2 images
    shards = [open_stream(source).shard(i, 2, 4) for i in range(2)]
    assert [shard.source.n_images for shard in shards] == [8, 8]
    assert [[len(images) for images in shard.segments(4)] for shard in shards] == [[4, 4], [4, 4]]
    assert shards[0].source.epoch == 11
    assert (shards[0].source.classes, len(shards[0].source.train)) == (("ant", "bee"), 18)


def test_a_shard_goes_on_where_it_was():
    whole = open_stream("synthetic:?size=8").shard(1, 2, 4)
    whole.read(4)
    state = whole.state_dict()
    again = open_stream("synthetic:?size=8").shard(1, 2, 4)
    again.load_state_dict(state)
    assert np.array_equal(again.read(4), whole.read(4))


def test_feeds_are_divided_and_too_few_are_told(tmp_path):
    feeds = []
    for i in range(5):
        (tmp_path / str(i)).mkdir()
        feeds.append(make_feed("watch", str(tmp_path / str(i))))
    stream = CameraStream(feeds)
    shares = [[feed.where[-1] for feed in stream.shard(i, 2, 8).feeds] for i in range(2)]
    assert shares == [["0", "2", "4"], ["1", "3"]]
    with pytest.raises(UserError, match="there are 6 ranks and 5 sources"):
        stream.shard(0, 6, 8)
