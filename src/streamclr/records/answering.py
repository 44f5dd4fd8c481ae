"""Which answers leave the machine, and where to; needs no torch."""

from dataclasses import dataclass

from streamclr.base.options import option


@dataclass(frozen=True)
class AnswerOptions:
    """Where the answers go, and which of them."""

    to: tuple[str, ...] = option(
        (), "send answers to mqtt://broker/topic, https://hook or file.jsonl; may be given several times"
    )
    threshold: float | None = option(None, "below this probability the class of an answer is unknown [0]")
    smooth: int | None = option(None, "answers are the mean of the last N frames of a camera [1]")
    every_frame: bool = option(False, "send an answer for each frame, not only when the class changes")
    snapshot: bool = option(False, "send the frame with each answer: JPEG in base64, as the encoder sees it")
