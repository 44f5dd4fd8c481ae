"""One encoder on several ranks: each has its own stream and its own buffer, and contrasts against the images of all.

Started by `torchrun`, which tells each process its rank. The projections of all ranks are gathered with their gradient,
so that the loss is that of one large batch; DistributedDataParallel gives every rank the mean of all ranks' gradients.

Whatever the ranks do together, all of them do, in the same order: a rank that went its own way would be waited for in
vain. What only one of them knows (a signal, the end of its stream, a step that broke) is agreed on by `largest`.
"""

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from streamclr.base.errors import LostRank, NotFinite, QuietExit, UserError

TIMEOUT = timedelta(minutes=10)  # for the slowest rank's next step; a rank that died is noticed at once


class OneProcess:
    """One process: there is nobody to agree with."""

    index, n = 0, 1

    def share(self, model: nn.Module) -> nn.Module:
        """One model on all ranks, with the weights of the first. Returns what to call for a pass with gradients."""
        return model

    def unshare(self, model: nn.Module) -> None:
        """The model as it was made, for this rank alone."""

    def gather(self, z: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other, with their gradient."""
        return z

    def settle(self, model: nn.Module) -> None:
        """After an update: the same running statistics on all ranks."""

    def largest(self, *values: float) -> list[float]:
        """Of each value the largest that a rank has."""
        return list(values)

    def collect(self, value: Any) -> list[Any]:
        """What each rank has, in the order of the ranks."""
        return [value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What breaks on one rank breaks on all; the first of them says why."""
        yield

    def close(self) -> None:
        """Leave the others, for whom this rank is not lost then."""

    def __enter__(self) -> "OneProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Ranks(OneProcess):
    """The processes of one job of `torchrun`.

    device: of this rank; GPUs talk by nccl, CPUs by gloo.
    norm_over: `all`: BatchNorm takes the statistics of all ranks' images; `own`: each rank those of its own images, and
        the running ones are averaged.
    """

    def __init__(self, device: torch.device, norm_over: str = "all"):
        # What is agreed on lies on the CPU, whatever the device: a GPU need not stop for it.
        with _talk():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        self.index, self.n, self.norm_over = dist.get_rank(), dist.get_world_size(), norm_over

    def share(self, model: nn.Module) -> nn.Module:
        if self.norm_over not in NORM_OVER:
            raise UserError(f"norm_over is {self.norm_over!r}: use {' or '.join(NORM_OVER)}")
        if self.norm_over == "all":
            _change_norms(model, nn.BatchNorm2d, SharedBatchNorm)
        # find_unused_parameters: else it has another order of sums after its first step, so that a job of three ranks
        # would not go on bit by bit as it was (docs/log.md).
        warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1x1 weights, whose strides mean nothing
        with _talk(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers
            return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)

    def unshare(self, model: nn.Module) -> None:
        _change_norms(model, SharedBatchNorm, nn.BatchNorm2d)

    def gather(self, z: Tensor) -> Tensor:
        return _Gather.apply(z)

    def settle(self, model: nn.Module) -> None:
        if self.norm_over == "own":
            with _talk():
                for buffer in model.buffers():
                    if buffer.is_floating_point():
                        dist.all_reduce(buffer)
                        buffer /= self.n

    def largest(self, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        with _talk():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def collect(self, value: Any) -> list[Any]:
        values = [None] * self.n
        with _talk():
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        broken: UserError | None = None
        try:
            yield
        except LostRank:
            raise
        except UserError as error:
            broken = error
        except RuntimeError as error:
            if "gloo" in str(error) or isinstance(error, dist.DistError):  # from within a backward pass
                raise lost(error) from None
            raise
        how = 0 if broken is None else 1 if isinstance(broken, NotFinite) else 2
        (worst,) = self.largest(how)
        if not worst:
            return
        (number,) = self.largest(-self.index if how == worst else -self.n)
        first = -int(number)
        if broken is not None and (self.index == first or how == worst == 1):
            raise broken
        raise NotFinite(f"the step of rank {first} is not finite") if worst == 1 else QuietExit(2)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # else gloo now and then aborts when the process ends

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and threading.current_thread() is threading.main_thread():
            # torchrun ends all ranks as soon as one has failed: what this one has to say comes first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.close()


NORM_OVER = ("all", "own")


@contextmanager
def _talk() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo, nccl or the store, which have no class of their own in common
        raise lost(error) from None


def lost(error: RuntimeError) -> LostRank:
    why = str(error).splitlines()[0].rpartition("] ")[2][:100]
    return LostRank(f"a rank of this job has died or cannot be reached ({why})")


class _Gather(torch.autograd.Function):
    """All ranks' rows; a row's gradient is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        parts = [torch.empty_like(z, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        with _talk():
            dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)  # autograd may use its own once more
        with _talk():
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class SharedBatchNorm(nn.BatchNorm2d):
    """BatchNorm with the mean and variance of all ranks' images, each rank having as many; on any device."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        moments = torch.stack(torch.var_mean(x, (0, 2, 3), correction=0))  # 2 x channels
        variances, means = _Gather.apply(moments[None]).unbind(1)  # each ranks x channels
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        n = dist.get_world_size() * x.numel() // x.shape[1]
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * (n / max(1, n - 1)), momentum)
        gain = self.weight * (variance + self.eps).rsqrt()
        return x * gain[:, None, None] + (self.bias - mean * gain)[:, None, None]


def _change_norms(model: nn.Module, before: type[nn.Module], after: type[nn.Module]) -> None:
    """Every BatchNorm of one class becomes one of another, with the same weights under the same names."""
    for module in model.modules():
        if type(module) is before:
            module.__class__ = after


def join(device: str | None = None, norm_over: str = "all") -> OneProcess:
    """The ranks of this job; alone if `torchrun` did not start it. Each rank of a machine takes a GPU of its own."""
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    if None in told or told[1] == "1":
        return OneProcess()
    if not dist.is_available():
        raise UserError("this build of torch has no torch.distributed: run without torchrun")
    cuda = torch.cuda.is_available() and device != "cpu"
    if device not in (None, "cpu", "cuda") or (device == "cuda" and not cuda):
        raise UserError(f"the device of several ranks is {device!r}: use cpu, or cuda where there are GPUs")
    if cuda:
        local, n_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= n_gpus:
            raise UserError(f"there are more ranks than GPUs ({n_gpus}) here: use --nproc-per-node {n_gpus}")
        torch.cuda.set_device(local)  # what `cuda` means from here on
    return Ranks(torch.device("cuda" if cuda else "cpu"), norm_over)
