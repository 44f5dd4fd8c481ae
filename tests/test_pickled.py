import io
import os
import pickle
import pickletools

import numpy as np
import pytest

from streamclr import UserError
from streamclr.streams.datasets.pickled import read_pickle

BATCH = {
    b"batch_label": b"training batch 1 of 5",
    b"labels": [6, 9, 9, 4, 1, 1, 300, 70000, -3],
    b"data": np.arange(60, dtype=np.uint8).reshape(5, 12),
    b"filenames": [b"a.png", b"b.png"],
    "text": ("é", 1.5, None, True, (1, 2), ()),
    "wide": np.arange(6, dtype=">i4").reshape(2, 3).T,
}


@pytest.mark.parametrize("protocol", range(6))
def test_reads_plain_data_of_every_protocol(protocol):
    read = read_pickle(pickle.dumps(BATCH, protocol), "f")
    assert read.keys() == BATCH.keys()
    for key, value in BATCH.items():
        if isinstance(value, np.ndarray):
            assert read[key].dtype == value.dtype
            assert np.array_equal(read[key], value)
        else:
            assert read[key] == value


def test_reads_what_python_2_wrote():
    """The instructions of the official files: str as bytes, the array's buffer as a string."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\nq\x02K\x00\x85U\x01btRq\x03(K\x01K\x02K\x03\x86"
        b"cnumpy\ndtype\nq\x04(U\x02u1K\x00K\x01tRq\x05(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06abcdeftb"
    )
    data = b"\x80\x02}q\x00(U\x04data" + array + b"U\x06labels]q\x06(K\x06K\x09eu."
    read = read_pickle(data, "f")
    assert read[b"data"].tolist() == [[97, 98, 99], [100, 101, 102]]
    assert read[b"labels"] == [6, 9]


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("exploited",)


class State:
    def __init__(self):
        self.x = 1


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value", [Exploit(), [1, {"a": Exploit()}], State(), np.array([Exploit()], dtype=object), print]
)
def test_executes_nothing(protocol, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps(value, protocol)
    if value is print:  # a name, never looked up
        assert read_pickle(content, "some/file") == f"{'__builtin__' if protocol < 3 else 'builtins'}.print"
    else:
        with pytest.raises(UserError, match=r"^some/file "):
            read_pickle(content, "some/file")
    assert not list(tmp_path.iterdir())


def test_traps_for_a_reader():
    circle: list = []
    circle.append(circle)
    nested: list = []
    for _ in range(100):
        nested = [nested, nested]  # 2 ** 100 lists for one that copies
    with pytest.raises(UserError, match="contains itself"):
        read_pickle(pickle.dumps(circle), "f")
    assert len(read_pickle(pickle.dumps(nested), "f")) == 2
    with pytest.raises(UserError, match=r"^f is not a whole pickle"):
        read_pickle(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "f")
    with pytest.raises(UserError, match=r"^f is not a whole pickle"):
        read_pickle(b"c_codecs\nencode\n(Vx\nVnosuch\ntR.", "f")
    for end in (b"K\x01s.", b"K\x01u."):  # a key whose hash overflows the stack of a reader
        deep = b"}" + b"(" * (end[2:3] == b"u") + b")" + b"\x85" * 500_000 + end
        with pytest.raises(UserError, match=r"^f holds a dict whose keys"):
            read_pickle(b"\x80\x02" + deep, "f")


def test_every_truncation_is_an_error_and_nothing_else():
    data = pickle.dumps(BATCH, 2)
    for end in range(len(data)):
        with pytest.raises(UserError, match=r"^f "):
            read_pickle(data[:end], "f")


def test_any_damage_is_an_error_or_plain_data():
    data, rng = pickle.dumps(BATCH, 4), np.random.default_rng(0)
    for _ in range(2000):
        broken = bytearray(data)
        broken[rng.integers(len(data))] = rng.integers(256)
        try:
            read_pickle(bytes(broken), "f")
        except UserError as error:
            assert str(error).startswith("f ")  # noqa: PT017


def test_the_pickles_of_this_test_hold_the_instructions_they_are_meant_to():
    names = {op.name for op, _, _ in pickletools.genops(io.BytesIO(pickle.dumps(Exploit(), 2)))}
    assert {"GLOBAL", "REDUCE"} <= names


@pytest.mark.parametrize("dtype", ["i4,(2,", "f8,(", "i4,i4", "int", "i(", "O8", "i123"])
def test_the_type_of_an_array_is_that_of_numbers(dtype):
    plain = pickle.dumps(np.zeros(4, np.uint8), 2)
    content = plain.replace(b"X\x02\x00\x00\x00u1", b"X" + len(dtype).to_bytes(4, "little") + dtype.encode())
    with pytest.raises(UserError, match="only numbers are read"):
        read_pickle(content, "file")
