"""Norm, activation and the next convolution as one step of autograd, which keeps half as much for the backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.encoders.blocks import Block


def can_fuse(block: Block) -> bool:
    return all(type(norm) is nn.BatchNorm2d for _, norm in block.path)


def learn_block(block: Block, x: Tensor) -> Tensor:
    """What a block computes in training. Of its path the outputs of the convolutions are kept alone."""
    c = block.path[0][0](x)
    for (_, norm), (conv, _) in zip(block.path, block.path[1:], strict=False):
        c = _NormActConv.apply(c, norm.weight, norm.bias, conv.weight, norm, conv, block)
    y = block.path[-1][1](c)
    if block.adds:
        shortcut = x if block.shortcut is None else block.shortcut[1](block.shortcut[0](x))
        y = y.add_(shortcut)
    return block.pool(block.activate_(y) if block.ends_active else y)


class _NormActConv(torch.autograd.Function):
    """conv(activation(norm(c))). The activation is made again in the backward pass, which costs less than memory."""

    @staticmethod
    def forward(
        ctx: Any,
        c: Tensor,
        gain: Tensor,
        bias: Tensor,
        weight: Tensor,
        norm: nn.BatchNorm2d,
        conv: nn.Conv2d,
        block: Block,
    ) -> Tensor:
        if norm.training:
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked += 1
            momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        else:
            momentum = 0.0
        y, mean, scale = torch.native_batch_norm(
            c, gain, bias, norm.running_mean, norm.running_var, norm.training, momentum, norm.eps
        )
        if not norm.training:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            mean, scale = norm.running_mean, (norm.running_var + norm.eps).rsqrt()
        ctx.norm, ctx.conv, ctx.block, ctx.training = norm, conv, block, norm.training
        ctx.save_for_backward(c, gain, bias, weight, mean, scale)  # scale is 1 / standard deviation
        return F.conv2d(block.activate_(y), weight, None, conv.stride, conv.padding, groups=conv.groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        c, gain, bias, weight, mean, scale = ctx.saved_tensors
        norm, conv, block = ctx.norm, ctx.conv, ctx.block
        slope = gain * scale
        y = torch.addcmul((bias - mean * slope).view(1, -1, 1, 1), c, slope.view(1, -1, 1, 1))
        dy, d_weight, _ = torch.ops.aten.convolution_backward(
            gradients[0], block.activate_(y), weight, None, conv.stride, conv.padding, [1, 1], False, [0, 0],
            conv.groups, [True, weight.requires_grad, False],
        )  # fmt: skip
        torch.ops.aten.hardtanh_backward.grad_input(dy, y, 0.0, block.ceiling, grad_input=dy)
        dc, d_gain, d_bias = torch.ops.aten.native_batch_norm_backward(
            dy, c, gain, norm.running_mean, norm.running_var, mean, scale, ctx.training, norm.eps,
            [ctx.needs_input_grad[0], gain.requires_grad, bias.requires_grad],
        )  # fmt: skip
        return dc, d_gain, d_bias, d_weight, None, None, None
