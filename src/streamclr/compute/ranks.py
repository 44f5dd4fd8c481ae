"""One encoder on several ranks: each rank has its own stream and buffer, and contrasts against the images of all.

`torchrun` starts the processes. The projections of all ranks are gathered with their gradient, so that the loss is that
of one large batch; DistributedDataParallel gives every rank the mean of all ranks' gradients.

All ranks make the same collective calls in the same order, else they would wait for each other forever. What only one
rank knows (a signal, the end of its stream, an error in its step) is shared by `largest`.
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
from streamclr.compute.chunked import update_running

TIMEOUT = timedelta(minutes=10)  # to wait for the slowest rank; a dead rank is noticed at once


class OneProcess:
    """A job of one process: no communication. `Ranks` has the same methods for several processes."""

    index, n = 0, 1

    def share(self, model: nn.Module) -> nn.Module:
        """Give all ranks the weights of rank 0. Returns the module to call for a training pass."""
        return model

    def unshare(self, model: nn.Module) -> None:
        """Undo `share`: the model works without the other ranks again."""

    def start_alike(self, module: nn.Module) -> None:
        """Give all ranks the weights of rank 0, of a module whose gradients are the same on all ranks."""

    def gather(self, z: Tensor) -> Tensor:
        """The rows of all ranks, in rank order, with gradient."""
        return z

    def settle(self, model: nn.Module) -> None:
        """Make BatchNorm's running statistics the same on all ranks."""

    def largest(self, *values: float) -> list[float]:
        """The maximum over all ranks, of each value."""
        return list(values)

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        return [value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error on one rank ends the block on all: the first rank with an error raises it, others exit quietly."""
        yield

    def close(self) -> None:
        """Leave the job in order, so that the other ranks do not report this one as lost."""

    def __enter__(self) -> "OneProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Ranks(OneProcess):
    """The processes of one job of `torchrun`.

    device: of this rank; GPUs communicate by nccl, CPUs by gloo.
    norm_over: `all`: BatchNorm uses the statistics of all ranks' images; `own`: each rank uses those of its own images,
        and the running statistics are averaged.
    """

    def __init__(self, device: torch.device, norm_over: str = "all"):
        # Gloo on CUDA too: flags are exchanged on the CPU, so that a GPU need not synchronise for them.
        with _communication():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        self.index, self.n, self.norm_over = dist.get_rank(), dist.get_world_size(), norm_over

    def share(self, model: nn.Module) -> nn.Module:
        if self.norm_over not in NORM_OVER:
            raise UserError(f"norm_over is {self.norm_over!r}: use {' or '.join(NORM_OVER)}")
        if self.norm_over == "all":
            _change_norms(model, SHARED)
        # Without find_unused_parameters the order of sums changes after the first step, and a job of three ranks would
        # not resume bit by bit (docs/log.md).
        warnings.filterwarnings("ignore", "Grad strides do not match")  # of 1x1 weights, where strides do not matter
        with _communication(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers
            return DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)

    def unshare(self, model: nn.Module) -> None:
        _change_norms(model, {shared: own for own, shared in SHARED.items()})

    def start_alike(self, module: nn.Module) -> None:
        with _communication():
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)

    def gather(self, z: Tensor) -> Tensor:
        return _Gather.apply(z)

    def settle(self, model: nn.Module) -> None:
        if self.norm_over == "own":
            with _communication():
                for buffer in model.buffers():
                    if buffer.is_floating_point():
                        dist.all_reduce(buffer)
                        buffer /= self.n

    def largest(self, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        with _communication():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def collect(self, value: Any) -> list[Any]:
        values = [None] * self.n
        with _communication():
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
            if "gloo" in str(error) or isinstance(error, dist.DistError):  # raised inside a backward pass
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
            dist.destroy_process_group()  # else gloo sometimes aborts when the process ends

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and threading.current_thread() is threading.main_thread():
            # torchrun terminates all ranks as soon as one has failed: this one reports its error first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.close()


NORM_OVER = ("all", "own")


@contextmanager
def _communication() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo, nccl and the store have no common class of errors
        raise lost(error) from None


def lost(error: RuntimeError) -> LostRank:
    why = str(error).splitlines()[0].rpartition("] ")[2][:100]
    return LostRank(f"a rank of this job has died or cannot be reached ({why})")


class _Gather(torch.autograd.Function):
    """The rows of all ranks; a row's gradient is the sum of its gradients on all ranks.

    torch.distributed.nn.functional.all_gather does the same, but is deprecated in torch 2.13.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        parts = [torch.empty_like(z, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        with _communication():
            dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)  # autograd may use its own again
        with _communication():
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class SharedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm with the mean and variance of all ranks' images, on any device; each rank has the same number."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        dtype, x = x.dtype, x.to(self.weight.dtype)  # statistics of bfloat16 are not taken in bfloat16
        moments = torch.stack(torch.var_mean(x, (0, *range(2, x.ndim)), correction=0))  # 2 x channels
        variances, means = _Gather.apply(moments[None]).unbind(1)  # each ranks x channels
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        update_running(self, mean, variance, dist.get_world_size() * x.numel() // x.shape[1])
        gain = self.weight * (variance + self.eps).rsqrt()
        per_channel = (-1, *(1,) * (x.ndim - 2))  # channels, or channels x 1 x 1
        return (x * gain.view(per_channel) + (self.bias - mean * gain).view(per_channel)).to(dtype)


class SharedBatchNorm1d(SharedBatchNorm, nn.BatchNorm1d):
    pass


class SharedBatchNorm2d(SharedBatchNorm, nn.BatchNorm2d):
    pass


SHARED: dict[type[nn.Module], type[nn.Module]] = {nn.BatchNorm1d: SharedBatchNorm1d, nn.BatchNorm2d: SharedBatchNorm2d}


def _change_norms(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Change the class of every BatchNorm in place; weights and names stay."""
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))


def join(device: str | None = None, norm_over: str = "all") -> OneProcess:
    """The ranks of this job; one process if `torchrun` did not start it. Each rank of a machine takes its own GPU."""
    given = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    if None in given or given[1] == "1":
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
        torch.cuda.set_device(local)  # `cuda` means this GPU from here on
    return Ranks(torch.device("cuda" if cuda else "cpu"), norm_over)
