"""The second look: where int8 is unsure between two classes, the same file runs the image again in float."""

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

MAX_CHANGED = 0.003  # share of the images whose class int8 may change without a second look; 0.005 came close to 1 %


def margin(probabilities: Tensor) -> Tensor:
    """The difference between the two largest probabilities of each image, n."""
    two = probabilities.topk(2, 1).values
    return two[:, 0] - two[:, 1]


def least_margin(exact: Tensor, found: Tensor) -> float:
    """The margin below which an image needs a second look; 0 if none does.

    exact, found: probabilities in float and int8 of the same images, n x classes. Too few of their classes change to
    count them. So the error of each image is applied to every image, and the share of changed classes above a margin is
    taken over all these pairs.
    """
    if found.shape[1] < 2:  # a single class
        return 0.0
    logits = found.clamp(min=1e-30).log()
    errors = exact.clamp(min=1e-30).log() - logits
    first, margins = found.argmax(1), margin(found)
    pairs = zip(logits, first, strict=True)
    changed = torch.stack([((own + errors).argmax(1) != c).double().mean() for own, c in pairs])
    surest = margins.argsort(descending=True)
    fine = changed[surest].cumsum(0) <= MAX_CHANGED * len(found)
    return 0.0 if fine.all() else float(f"{margins[surest[fine.sum()]]:.3g}")


def look_again(quantised: onnx.ModelProto, model: onnx.ModelProto, least: float) -> None:
    """Add a second look at images below this margin to the quantised file, by the float model that it came from.

    Both have the same pre-processing. The float encoder takes its result, only the doubtful rows; without any it does
    not run.
    """
    graph, outputs = quantised.graph, ["probabilities", "features"]
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [f"first_{name}" if name in outputs else name for name in names]
    pixels = next(node.input[0] for node in model.graph.node if node.op_type == "Conv")  # the standardised images
    part = _encoder(model, pixels)
    then = helper.make_graph(
        [
            helper.make_node("GatherND", [pixels, "rows"], [f"again_{pixels}"]),
            *part.node,
            *(
                helper.make_node("ScatterND", [f"first_{name}", "rows", f"again_{name}"], [f"second_{name}"])
                for name in outputs
            ),
        ],
        "second_look",
        [],
        [_float(f"second_{name}") for name in outputs],
        part.initializer,
    )
    otherwise = helper.make_graph(
        [helper.make_node("Identity", [f"first_{name}"], [f"only_{name}"]) for name in outputs],
        "no_second_look",
        [],
        [_float(f"only_{name}") for name in outputs],
    )
    graph.initializer.extend(
        [
            helper.make_tensor("two", TensorProto.INT64, [1], [2]),
            helper.make_tensor("difference", TensorProto.FLOAT, [2], [1, -1]),
            helper.make_tensor("least_margin", TensorProto.FLOAT, [], [least]),
            helper.make_tensor("none", TensorProto.INT64, [], [0]),
        ]
    )
    for operator, inputs, results in (
        ("TopK", ["first_probabilities", "two"], ["largest", "order"]),
        ("MatMul", ["largest", "difference"], ["margin"]),
        ("Less", ["margin", "least_margin"], ["doubtful"]),
        ("NonZero", ["doubtful"], ["numbers"]),
        ("Transpose", ["numbers"], ["rows"]),  # n doubtful x 1
        ("Size", ["rows"], ["n_doubtful"]),
        ("Greater", ["n_doubtful", "none"], ["any"]),
    ):
        graph.node.append(helper.make_node(operator, inputs, results))
    graph.node.append(helper.make_node("If", ["any"], outputs, then_branch=then, else_branch=otherwise))


def _encoder(model: onnx.ModelProto, pixels: str) -> onnx.GraphProto:
    """What comes after the pre-processing, whose result is `pixels`; all names begin with `again_`."""
    nodes, needed = [], {output.name for output in model.graph.output}
    for node in reversed(model.graph.node):
        if needed & set(node.output) and pixels not in node.output:
            nodes.append(node)
            needed |= set(node.input)
    assert "images" not in needed, "the encoder takes in more than the pixels"
    part = onnx.GraphProto()
    part.node.extend(reversed(nodes))
    part.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    for tensor in part.initializer:
        tensor.name = f"again_{tensor.name}"
    for node in part.node:
        node.name = f"again_{node.name}"
        for ends in (node.input, node.output):
            ends[:] = [name and f"again_{name}" for name in ends]
    return part


def _float(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def with_doubtful(content: bytes) -> bytes | None:
    """The same file with a third output, `doubtful`: which images it runs twice. None if it has no second look."""
    model = onnx.load_from_string(content)
    if not any("doubtful" in node.output for node in model.graph.node):
        return None
    model.graph.output.append(helper.make_tensor_value_info("doubtful", TensorProto.BOOL, ["n"]))
    return model.SerializeToString()
