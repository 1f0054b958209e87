"""Whether the kernels can run on a device. Imports no Triton; imported itself only when asked.

(The decorator below loads torch's compiler, and that loads Triton.)
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

LARGE_SHARED_MEMORY = 200 * 1024  # data-centre GPUs from Hopper on have 227 KB
_CAPABILITY = (8, 0)


@torch.compiler.assume_constant_result
def device_lacks(kind: str, index: int | None) -> str | None:
    """What Triton kernels would need and what came instead; None if they can run there."""
    if find_spec("triton") is None:
        return "the package triton, which is not installed,"
    if kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":  # kernels run as Python
        return None
    if kind != "cuda" or torch.version.hip is not None:
        return f"an NVIDIA GPU, got tensors on {kind}"
    capability = torch.cuda.get_device_capability(index)
    if capability < _CAPABILITY:
        return f"a compute capability of at least 8.0, got {'.'.join(map(str, capability))}"
    return None


def shared_memory(index: int | None) -> int:
    """Bytes of shared memory that one program may have on a CUDA device."""
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


def has_warpgroups(index: int | None) -> bool:
    """Whether the main loops run by Hopper's kernels: on compute capability 9.0.

    `PATH_ATTENTION_HOPPER=0` declines, to compare.
    """
    declined = os.environ.get("PATH_ATTENTION_HOPPER") == "0"
    return not declined and torch.cuda.get_device_capability(index) == (9, 0)


@torch.compiler.assume_constant_result
def largest_head_size(kind: str, index: int | None, dtype: torch.dtype) -> int:
    """The largest D and DV whose tiles fit a device's shared memory."""
    large = kind != "cuda" or shared_memory(index) >= LARGE_SHARED_MEMORY
    return (256 if large else 128) // (2 if dtype == torch.float32 else 1)
