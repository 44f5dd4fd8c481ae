import random

import pytest

from streamclr.streams.cameras.jpegs import JpegSplitter
from support.camera import jpeg

IMAGES = [jpeg(number, size) for number, size in ((1, (64, 64)), (2, (40, 30)), (3, (200, 100)))]


@pytest.mark.parametrize("between", [b"", b"\r\n--x\r\nContent-Type: image/jpeg\r\n\r\n", b"\xff\xd8 \xff\xff"])
@pytest.mark.parametrize("n", [1, 3, 17, 100_000])
def test_files_are_found_however_the_bytes_come(between, n):
    content = between.join([b"", *IMAGES, b""])
    splitter = JpegSplitter()
    found = [image for i in range(0, len(content), n) for image in splitter.feed(content[i : i + n])]
    assert found == IMAGES
    assert not list(splitter.rest())


def test_a_thumbnail_inside_does_not_end_a_file():
    inner = IMAGES[1]
    segment = b"\xff\xe1" + (len(inner) + 2).to_bytes(2, "big") + inner
    outer = IMAGES[0][:2] + segment + IMAGES[0][2:]
    assert list(JpegSplitter().feed(outer + IMAGES[2])) == [outer, IMAGES[2]]


def test_a_file_that_is_cut_off_does_not_take_the_next_with_it():
    for length in (10, 200, len(IMAGES[0]) - 2):
        splitter = JpegSplitter()
        found = [*splitter.feed(IMAGES[0][:length] + IMAGES[1] + IMAGES[2]), *splitter.rest()]
        assert IMAGES[2] in found
        assert all(len(part) <= len(IMAGES[0]) + len(IMAGES[1]) for part in found)
    splitter = JpegSplitter()
    assert list(splitter.feed(IMAGES[0][:-1])) == []
    assert list(splitter.rest()) == [IMAGES[0][:-1]]
    assert list(splitter.feed(IMAGES[1])) == [IMAGES[1]]


def test_any_bytes_at_all():
    rng = random.Random(0)
    for _ in range(300):
        content = bytearray(b"".join(IMAGES))
        for _ in range(rng.randrange(1, 40)):
            content[rng.randrange(len(content))] = rng.choice((0, 0xFF, 0xD8, 0xD9, rng.randrange(256)))
        splitter = JpegSplitter()
        found = [*splitter.feed(bytes(content) + IMAGES[0] * 3), *splitter.rest()]
        assert sum(map(len, found)) <= len(content) + 3 * len(IMAGES[0])
        assert all(part.startswith(b"\xff\xd8") for part in found)
