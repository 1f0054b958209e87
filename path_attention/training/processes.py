"""The processes of a run: one alone, or those that `torchrun` started; and a model on them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from path_attention.training.recipe import Parallel, Precision


@dataclass(frozen=True)
class Processes:
    """This process among the others.

    Attributes:
        rank: 0 ≤ rank < count.
        count: how many there are.
        device: this one's.
        context: how many, neighbours in rank, share a sequence.
        context_group: the group of those that share this one's; None if it has its own.
    """

    rank: int
    count: int
    device: torch.device
    context: int = 1
    context_group: dist.ProcessGroup | None = None

    @property
    def data_rank(self) -> int:
        """Whose rows this process's are: 0 ≤ data_rank < data_count."""
        return self.rank // self.context

    @property
    def data_count(self) -> int:
        """How many different rows there are at a time."""
        return self.count // self.context

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, *values: float | Tensor) -> list[float]:
        """Each value summed over all processes, in float64. Waits for the device."""
        total = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values]
        )
        if self.count > 1:
            dist.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    @contextmanager
    def first_does(self) -> Iterator[None]:
        """The first process runs the body before the others do; if it fails, all fail."""
        failed: BaseException | None = None
        if not self.first:
            self._share(None)
            yield
            return
        try:
            yield
        except BaseException as error:
            failed = error
            raise
        finally:
            self._share(None if failed is None else f"{type(failed).__name__}: {failed}")

    def _share(self, failure: str | None) -> None:
        if self.count == 1:
            return
        box = [failure]
        dist.broadcast_object_list(box, src=0)
        if box[0] is not None and not self.first:
            raise ValueError(f"the first process failed: {box[0]}")


@contextmanager
def start_processes(device: str = "auto") -> Iterator[Processes]:
    """Join the processes that `torchrun` started, if it did; leave them at the end.

    Args:
        device: "cpu", "cuda" (each process takes the one of its LOCAL_RANK), or "auto".

    Raises:
        ValueError: CUDA was asked for and is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device: expected one that is there, got 'cuda', which torch does not find"
        )
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else None
    if place is not None:
        torch.cuda.set_device(place)
    place = place or torch.device("cpu")
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        joined = dist.is_initialized()
        yield Processes(
            dist.get_rank() if joined else 0, dist.get_world_size() if joined else 1, place
        )
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()


def share_context(processes: Processes, context: int) -> Processes:
    """The same processes as a mesh (data, context): each `context` neighbours share sequences."""
    if context == 1:
        return processes
    kind = processes.device.type
    mesh = init_device_mesh(
        kind, (processes.count // context, context), mesh_dim_names=("data", "context")
    )
    group = mesh.get_group("context")
    # what NCCL needs before processes of a group exchange without the others
    dist.barrier(group, device_ids=[processes.device.index] if kind == "cuda" else None)
    return dataclasses.replace(processes, context=context, context_group=group)


def spread(
    model: nn.Module,
    parallel: Parallel,
    processes: Processes,
    dtype: torch.dtype = torch.float32,
    *,
    compiled: bool = False,
) -> nn.Module:
    """The model as it trains on these processes: itself if alone, else copied ("ddp") or spread
    ("fsdp": each block of `model._no_split_modules`, then the rest).

    Spread, a block's plain linear layers travel in `dtype` (autocast would cast them anyway), and
    everything else, norms and gates above all, in float32; gradients are summed in float32. Both
    ways over all processes: those that share a sequence have their own tokens' gradients. In a
    compiled block, which a second group would cut in two, all of it travels in float32.

    Raises:
        ValueError: a way to spread was named, and no process group was started.
    """
    if processes.count == 1 and parallel == "auto":
        return model
    if not dist.is_initialized():
        raise ValueError(
            f'parallel: expected "auto" in a single process, got "{parallel}"; start with torchrun'
        )
    if parallel == "fsdp":
        mesh = init_device_mesh(processes.device.type, (processes.count,))
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        whole = MixedPrecisionPolicy(cast_forward_inputs=False)
        halved = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for module in list(model.modules()):
            if type(module).__name__ in blocks:
                if dtype != torch.float32 and not compiled:
                    for linear in _linear_groups(module):
                        fully_shard(linear, mesh=mesh, mp_policy=halved)
                fully_shard(module, mesh=mesh, mp_policy=whole)
        fully_shard(model, mesh=mesh, mp_policy=whole)
        return model
    return DistributedDataParallel(
        model, device_ids=[processes.device] if processes.device.type == "cuda" else None
    )


def _linear_groups(block: nn.Module) -> list[list[nn.Module]]:
    """A block's plain linear layers, by what travels together.

    All at once, unless some are frozen: a group comes back in the backward pass if the last of its
    layers has a gradient, so what runs without gradients must not share one with what has some.
    """
    parts = [block]
    if not all(p.requires_grad for p in block.parameters()):
        parts = list(block.children())
    groups = [[layer for layer in part.modules() if type(layer) is nn.Linear] for part in parts]
    return [list[nn.Module](group) for group in groups if group]


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass adds gradients up over processes."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def choose_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: "auto" is bfloat16 where the device multiplies it natively."""
    if precision == "float32":
        return torch.float32
    if precision == "bfloat16":
        return torch.bfloat16
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        tests = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in _CPU_BF16)
        native = any(test is not None and test() for test in tests)
    return torch.bfloat16 if native else torch.float32


_CPU_BF16 = ("avx512_bf16", "amx_tile")
