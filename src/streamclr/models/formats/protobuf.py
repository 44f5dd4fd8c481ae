"""Reads the fields of a protobuf message, to check a model before a runtime opens it."""

from collections.abc import Iterator


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field, in order; a ValueError if the bytes are no message."""
    place, end = 0, len(message)

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while place < end and shift < 70:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("a number does not end")

    def take(n: int) -> memoryview:
        nonlocal place
        if n > end - place:
            raise ValueError("it is cut off")
        place += n
        return message[place - n : place]

    while place < end:
        key = varint()
        if key >= 2**32:  # other readers cut it off there, and would read another field
            raise ValueError("a field number is too large")
        number, kind = key >> 3, key & 7
        if not number or kind not in (0, 1, 2, 5):
            raise ValueError(f"field {number} of kind {kind}")
        yield number, varint() if kind == 0 else take({1: 8, 5: 4}.get(kind) or varint())


def parts(message: memoryview, *numbers: int) -> Iterator[memoryview]:
    """The messages, texts and bytes in the fields of these numbers."""
    for number, value in fields(message):
        if number in numbers:
            if isinstance(value, int):
                raise ValueError(f"field {number} is a number")
            yield value
