import random

import pytest

from streamclr.models.formats import protobuf as wire

onnx = pytest.importorskip("onnx")


def model():
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["a", "b"], ["c"], name="plus")],
        "g",
        [onnx.helper.make_tensor_value_info("a", 1, [3])],
        [onnx.helper.make_tensor_value_info("c", 1, [3])],
        [onnx.helper.make_tensor("b", 1, [3], [1.0, 2.0, 3.0])],
    )
    made = onnx.helper.make_model(graph)
    made.metadata_props.add(key="who", value="Äpfel")
    return made


def test_the_fields_are_those_that_protobuf_reads():
    made = model()
    content = memoryview(made.SerializeToString())
    (graph,) = wire.parts(content, 7)
    (node,) = wire.parts(graph, 1)
    assert [bytes(text) for text in wire.parts(node, 1)] == [b"a", b"b"]
    assert [bytes(text) for text in wire.parts(node, 4)] == [b"Add"]
    (entry,) = wire.parts(content, 14)
    assert {n: bytes(value).decode() for n, value in wire.fields(entry)} == {1: "who", 2: "Äpfel"}
    assert dict(wire.fields(content))[1] == made.ir_version
    (tensor,) = wire.parts(graph, 5)
    assert dict(wire.fields(tensor))[1] == 3


def test_what_is_no_message_is_a_value_error():
    whole = model().SerializeToString()
    for content in (
        b"\x00",
        b"\xff" * 12,
        b"\x0b",
        b"\x0a\x05abc",
        b"\x09\x00",
        b"\x80" * 20 + b"\x01",
        b"\xf0\x80\x80\x80\x10\x01",
    ):
        with pytest.raises(ValueError):  # noqa: PT011  the message is for whoever names the file
            list(wire.fields(memoryview(content)))
    with pytest.raises(ValueError, match="is a number"):
        list(wire.parts(memoryview(whole), 1))


def test_nothing_but_a_value_error_whatever_the_bytes_are():
    whole, rng = model().SerializeToString(), random.Random(0)
    n_read = 0
    for _ in range(2000):
        content = bytearray(whole[: rng.randrange(1, len(whole) + 1)])
        for _ in range(rng.randrange(4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        try:
            for graph in wire.parts(memoryview(content), 7):
                n_read += sum(1 for _ in wire.fields(graph))
        except ValueError:
            pass
    assert n_read
