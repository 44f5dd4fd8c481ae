"""The gradient of one update in less memory: the views go through the model in chunks, with the same result.

NT-Xent contrasts every view with every other, so a batch cannot simply be split. There are two ways:

- Gradient caching (Gao et al. 2021), for encoders that treat every view by itself (GroupNorm, LayerNorm, no norm):
  encode chunk by chunk without a graph, take the loss's gradient with respect to the features, encode again chunk by
  chunk with the graph. Holds the activations of one chunk. Time: one more forward pass.
- BatchNorm couples the views in every layer, forward and backward: all chunks go through one layer before any goes
  through the next (`BatchNormPass`). Holds the inputs of the blocks, and the activations inside one block, for all
  views. Time: one more forward pass.

The projection head takes the features of all views at once. Layers that do not learn get no gradient, their BatchNorm
uses its running statistics, and nothing goes backward below the first block that learns.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.encoders.architecture import ENCODERS, is_built_in
from streamclr.encoders.blocks import Block
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import PointwiseConv

Model = Callable[[Tensor], Tensor]  # views to projections; in chunks a ContrastiveModel
Views = Callable[[slice], Tensor]  # the views in these rows; the same at every call
Loss = Callable[[Tensor], Tensor]  # of all projections


def backward(model: Model, views: Views, n: int, loss: Loss, chunk_size: int | None) -> float:
    """Add the gradient of the loss of n views to the parameters', as `loss(model(views)).backward()` does."""
    if chunk_size is None or chunk_size >= n:
        value = loss(model(views(slice(0, n))))
        value.backward()
        return value.item()
    assert isinstance(model, ContrastiveModel)
    rows = [slice(i, min(i + chunk_size, n)) for i in range(0, n, chunk_size)]
    if batch_norms(model.encoder):
        return BatchNormPass(model, views, rows).backward(loss)
    return cached_backward(model, views, rows, loss)


def batch_norms(encoder: nn.Module) -> list[nn.Module]:
    return [module for module in encoder.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def check_can_chunk(model: ContrastiveModel) -> None:
    norms = batch_norms(model.encoder)
    if norms and not (is_built_in(model.encoder) and all(type(norm) is nn.BatchNorm2d for norm in norms)):
        raise UserError(
            f"memory is given, and the encoder has BatchNorm but is none of {', '.join(ENCODERS)}: only these can "
            "compute its statistics in chunks; use GroupNorm, or leave memory out"
        )


def cached_backward(model: ContrastiveModel, views: Views, rows: list[slice], loss: Loss) -> float:
    random_states, parts = [], []
    with torch.no_grad():
        for chunk in rows:
            random_states.append(torch.get_rng_state())  # both passes must drop the same (dropout)
            parts.append(model.features(views(chunk)))
    after = torch.get_rng_state()
    value, gradient = _head_backward(model, torch.cat(parts), loss)
    for chunk, state in zip(rows, random_states, strict=True):
        torch.set_rng_state(state)
        if (features := model.features(views(chunk))).requires_grad:
            features.backward(gradient[chunk])
    torch.set_rng_state(after)
    return value


def _head_backward(model: ContrastiveModel, features: Tensor, loss: Loss) -> tuple[float, Tensor]:
    """The loss, and its gradient with respect to the features; that of the projection head is added to its own."""
    value = loss(model.project(features.requires_grad_()))
    value.backward()
    assert features.grad is not None
    return value.item(), features.grad


class Statistics:
    """One BatchNorm's statistics of the whole batch, for its forward and its backward pass; if frozen, the running."""

    mean: Tensor
    variance: Tensor

    def __init__(self, norm: nn.BatchNorm2d):
        self.norm = norm
        self.n = 0  # values per channel; 0 until the statistics are known
        self.d_weight, self.d_bias = torch.zeros_like(norm.weight), torch.zeros_like(norm.bias)
        if not norm.training:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            self.mean, self.variance = norm.running_mean, norm.running_var

    def gather(self, chunks: Iterable[Tensor]) -> None:
        """Mean and variance of all chunks together (Chan et al. 1979), unless they are known."""
        if self.n or not self.norm.training:
            return
        counts, *moments = zip(*map(_moments, chunks), strict=True)  # `map` holds one chunk at a time
        variances, means = (torch.stack(column).double() for column in moments)
        self.n = sum(counts)
        shares = means.new_tensor(counts)[:, None] / self.n
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        self.mean, self.variance = mean.to(self.norm.weight), variance.to(self.norm.weight)
        update_running(self.norm, self.mean, self.variance, self.n)

    def normalise(self, c: Tensor) -> Tensor:
        norm = self.norm
        return F.batch_norm(c, self.mean, self.variance, norm.weight, norm.bias, False, 0.0, norm.eps)

    def add_sums(self, dy: Tensor, c: Tensor) -> None:
        """The gradients of weight and bias, which are also the two sums that every input's gradient needs."""
        if not (self.norm.training or self.norm.weight.requires_grad):
            return
        _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
            dy, c, self.norm.weight, self.mean, self.variance, None, None, False, self.norm.eps, [False, True, True]
        )
        self.d_weight += d_weight
        self.d_bias += d_bias

    def backward(self, dy: Tensor, c: Tensor) -> Tensor:
        """dc = gain (dy - mean(dy) - x̂ mean(dy x̂)): per channel a linear map of dy and c. If frozen, gain dy alone."""
        scale = (self.variance + self.norm.eps).rsqrt()
        gain = self.norm.weight * scale
        if not self.norm.training:
            return dy * gain.view(1, -1, 1, 1)
        slope = -gain * scale * self.d_weight / self.n
        offset = -gain * self.d_bias / self.n - slope * self.mean
        gain, slope, offset = (v.view(1, -1, 1, 1) for v in (gain, slope, offset))
        return torch.addcmul(offset, dy, gain).addcmul_(c, slope)


def _moments(c: Tensor) -> tuple[int, Tensor, Tensor]:
    """Number of values, variance and mean per channel."""
    return c.numel() // c.shape[1], *torch.var_mean(c, (0, 2, 3), correction=0)


@torch.no_grad()
def update_running(norm: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor, n: int) -> None:
    """Update the running statistics as BatchNorm does, from those of a batch with n values per channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean, momentum)
    norm.running_var.lerp_(variance * (n / max(1, n - 1)), momentum)


Chunks = list[Tensor]  # of one activation; each is freed after its last use
FREED = torch.empty(0)


class BatchNormPass:
    """Forward and backward pass of an encoder, all chunks layer by layer, with the statistics of the whole batch.

    The forward pass keeps the inputs of the blocks, except in the first two stages, which have the largest activations:
    their inputs, and the convolutions in a block's backward pass, are computed again when needed.
    """

    def __init__(self, model: ContrastiveModel, views: Views, rows: list[slice]):
        assert is_built_in(model.encoder)
        self.model, self.views, self.rows = model, views, rows
        self.stem, *blocks = model.encoder.blocks
        n_frozen = 0  # blocks through which no gradient goes
        if not self.stem.learns:
            n_frozen = next((i for i, block in enumerate(blocks) if block.learns), len(blocks))
        self.frozen, self.blocks = blocks[:n_frozen], blocks[n_frozen:]
        self.statistics: dict[nn.Module, Statistics] = {
            module: Statistics(module) for module in model.encoder.modules() if isinstance(module, nn.BatchNorm2d)
        }

    def backward(self, loss: Loss) -> float:
        inputs: dict[Block, Chunks] = {}
        with torch.no_grad():
            x = self._start()
            for block in self.blocks:
                if not is_large(block):
                    inputs[block] = x
                x = self._block(block, x)
        value, gradient = _head_backward(self.model, torch.cat([chunk.mean((2, 3)) for chunk in x]), loss)
        with torch.no_grad():
            d = [
                (gradient[rows, :, None, None] / chunk[0, 0].numel()).expand_as(chunk).clone()
                for rows, chunk in zip(self.rows, x, strict=True)
            ]
            x.clear()
            for block in reversed(self.blocks):
                x = inputs.pop(block) if block in inputs else self._input(block)
                d = self._block_backward(block, x, d)
            if self.stem.learns:
                self._stem_backward(d)
            for statistics in self.statistics.values():
                _add_gradient(statistics.norm.weight, statistics.d_weight)
                _add_gradient(statistics.norm.bias, statistics.d_bias)
        return value

    def _stem_convolution(self, rows: slice) -> tuple[Tensor, Tensor]:
        x = self.model.standardise(self.views(rows)).contiguous(memory_format=torch.channels_last)
        return x, self.stem.path[0][0](x)

    def _start(self) -> Chunks:
        """The input of the first block that learns. Frozen blocks have no statistics to wait for: chunk after chunk."""
        statistics, out = self.statistics[self.stem.path[0][1]], []
        statistics.gather(self._stem_convolution(rows)[1] for rows in self.rows)
        for rows in self.rows:
            x = [self.stem.pool(self.stem.activate_(statistics.normalise(self._stem_convolution(rows)[1])))]
            for block in self.frozen:
                x = self._block(block, x)
            out += x
        return out

    def _stem_backward(self, d: Chunks) -> None:
        (conv, norm), pool = self.stem.path[0], self.stem.pool
        statistics = self.statistics[norm]

        def recompute(rows: slice, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, c = self._stem_convolution(rows)
            y = self.stem.activate_(statistics.normalise(c))
            if not isinstance(pool, nn.Identity):
                with torch.enable_grad():
                    (d,) = torch.autograd.grad(pool(y.requires_grad_()), y, d)
            return x, c, d * self.stem.passes(y.detach())

        for rows, chunk in zip(self.rows, d, strict=True):
            _, c, dy = recompute(rows, chunk)
            statistics.add_sums(dy, c)
        for rows, chunk in zip(self.rows, d, strict=True):
            x, c, dy = recompute(rows, chunk)
            _convolution_backward(conv, x, statistics.backward(dy, c), input_too=False)

    def _input(self, block: Block) -> Chunks:
        """The input of a block in the first two stages, computed again from the views."""
        x = self._start()
        for earlier in self.blocks:
            if earlier is block:
                break
            x = self._block(earlier, x)
        return x

    def _block(self, block: Block, x: Chunks) -> Chunks:
        path, shortcut = self._convolutions(block, x, keep=False)
        statistics, last = self.statistics[block.path[-1][1]], []
        for j in range(len(x)):
            last.append(self._last(block, path, x, j))
            if path:
                path[-1][j] = FREED
        statistics.gather(last)
        for j, c in enumerate(last):
            last[j] = self._end(block, c, x, shortcut, j)
        return last

    def _last(self, block: Block, path: list[Chunks], x: Chunks, j: int) -> Tensor:
        """The output of the path's last convolution, from that of the one before."""
        return block.path[-1][0](self._active(block, path, x, len(block.path) - 1, j))

    def _active(self, block: Block, path: list[Chunks], x: Chunks, i: int, j: int) -> Tensor:
        """The input of the path's convolution i."""
        return block.activate_(self.statistics[block.path[i - 1][1]].normalise(path[i - 1][j])) if i else x[j]

    def _end(self, block: Block, c: Tensor, x: Chunks, shortcut: Chunks, j: int) -> Tensor:
        """The output of the block, from that of its last convolution."""
        y = self.statistics[block.path[-1][1]].normalise(c)
        if block.adds:
            y += self.statistics[block.shortcut[1]].normalise(shortcut[j]) if block.shortcut else x[j]
        return block.activate_(y) if block.ends_active else y

    def _convolutions(self, block: Block, x: Chunks, keep: bool) -> tuple[list[Chunks], Chunks]:
        """The outputs of the path's convolutions except the last, and of the shortcut's."""
        path: list[Chunks] = []
        for i, (conv, norm) in enumerate(block.path[:-1]):
            out = []
            for j in range(len(x)):
                out.append(conv(self._active(block, path, x, i, j)))
                if i and not keep:
                    path[-1][j] = FREED
            path.append(out)
            self.statistics[norm].gather(out)
        shortcut = [block.shortcut[0](chunk) for chunk in x] if block.shortcut else []
        if block.shortcut:
            self.statistics[block.shortcut[1]].gather(shortcut)
        return path, shortcut

    def _block_backward(self, block: Block, x: Chunks, d_out: Chunks) -> Chunks:
        """The gradient of the block's input, if a layer before it learns."""
        path, shortcut = self._convolutions(block, x, keep=True)
        statistics = [self.statistics[norm] for _, norm in block.path]
        input_too = self.stem.learns or block is not self.blocks[0]
        if keep := not is_large(block):
            path.append([self._last(block, path, x, j) for j in range(len(x))])
        for j, d in enumerate(d_out):  # through the last activation
            c = path[-1][j] if keep else self._last(block, path, x, j)
            if block.ends_active:
                d *= block.passes(self._end(block, c, x, shortcut, j))
            statistics[-1].add_sums(d, c)
            if block.shortcut:
                self.statistics[block.shortcut[1]].add_sums(d, shortcut[j])
        dy = list(d_out)
        if not block.adds:
            d_out.clear()
        for i in reversed(range(len(block.path))):
            conv = block.path[i][0]
            for j in range(len(x)):
                if i == len(path):
                    c = self._last(block, path, x, j)
                else:
                    c = conv(x[j]) if not (i or keep) else path[i][j]
                    path[i][j] = FREED
                dc = statistics[i].backward(dy[j], c)
                dy[j] = c = FREED
                y = self._active(block, path, x, i, j)
                dy[j] = _convolution_backward(conv, y, dc, bool(i) or input_too)
                if i:
                    dy[j] *= block.passes(y)
                    statistics[i - 1].add_sums(dy[j], path[i - 1][j])
                    if i == 1 and not keep:
                        path[0][j] = FREED
                    continue
                if block.shortcut:
                    dc = self.statistics[block.shortcut[1]].backward(d_out[j], shortcut[j])
                    dy[j] += _convolution_backward(block.shortcut[0], x[j], dc, input_too)
                    shortcut[j] = FREED
                elif block.adds and input_too:
                    dy[j] += d_out[j]
                if block.adds:
                    d_out[j] = FREED
                x[j] = FREED
        return dy


def is_large(block: Block) -> bool:
    """Whether `BatchNormPass` saves memory in it at the price of time."""
    return block.stage < 2


def _convolution_backward(conv: nn.Conv2d, x: Tensor, dy: Tensor, input_too: bool) -> Tensor:
    """Returns the gradient of the input, empty if it is not needed; adds that of the weight to `weight.grad`."""
    used, stride, weight_too = x, list(conv.stride), conv.weight.requires_grad
    if drops_pixels := isinstance(conv, PointwiseConv) and conv.stride != (1, 1):
        used, stride = x[..., :: stride[0], :: stride[1]], [1, 1]
    dx, d_weight, _ = torch.ops.aten.convolution_backward(
        dy, used, conv.weight, None, stride, conv.padding, [1, 1], False, [0, 0], conv.groups,
        [input_too, weight_too, False],
    )  # fmt: skip
    if weight_too:
        _add_gradient(conv.weight, d_weight)
    if not input_too:
        return FREED
    if drops_pixels:
        whole = torch.zeros_like(x)
        whole[..., :: conv.stride[0], :: conv.stride[1]] = dx
        return whole
    return dx


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.requires_grad:
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
