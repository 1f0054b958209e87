"""Kernels compiled for a device that need not be here, and what they take of it.

A run on CPU tensors, whose launches are written down and not made, says which kernels there are and
what they are specialised for. It wants a process that does not interpret (`TRITON_INTERPRET`).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Tiled
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Launch(NamedTuple):
    kernel: Any
    args: tuple
    kwargs: dict[str, Any]


class Used(NamedTuple):
    """What one program takes.

    Attributes:
        registers: of a thread, on average where warps divide them among themselves.
        stack: bytes of a thread's stack, where registers spill to.
        shared: bytes of shared memory.
        warps: of a program, without those that warp specialisation adds.
        wgmma, mma: matrix instructions in its code, of a warpgroup and of a warp.
    """

    registers: int
    stack: int
    shared: int
    warps: int
    wgmma: int
    mma: int


class _Recorder:
    """Stands in for a kernel: writes down its launches."""

    def __init__(self, kernel: Any, seen: list[Launch]):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.seen.append(Launch(self.kernel, args, kwargs))


@contextlib.contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Inside, the kernels of these modules write their launches into the list and do not run."""
    seen: list[Launch] = []
    kernels = [(m, n, getattr(m, n)) for m in modules for n in dir(m) if n.endswith("_kernel")]
    for module, name, kernel in kernels:
        setattr(module, name, _Recorder(kernel, seen))
    try:
        yield seen
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def compile_launch(launch: Launch, capability: int) -> tuple[str, Used]:
    """Compile for a compute capability (90 for 9.0); a key that equal results share, and what it
    takes. Raises what Triton raises."""
    options = {n: launch.kwargs[n] for n in _OPTIONS if n in launch.kwargs}
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(_source(launch), target=target, options=options)
    usage = _resources(made.asm["cubin"])
    used = Used(
        registers=max(int(n) for n in re.findall(r"REG:(\d+)", usage)),
        stack=max(int(n) for n in re.findall(r"STACK:(\d+)", usage)),
        shared=made.metadata.shared,
        warps=made.metadata.num_warps,
        wgmma=made.asm["ptx"].count("wgmma.mma_async"),
        mma=made.asm["ptx"].count("mma.sync"),
    )
    return made.hash, used


def _source(launch: Launch) -> ASTSource:
    """What Triton would compile for a launch: types, constants, known divisibilities."""
    kernel, args, kwargs = launch
    bound = dict(zip([p.name for p in kernel.params], args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for n, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        divisible = isinstance(value, torch.Tensor) or (
            isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        )
        if divisible:
            attributes[(n,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, TensorDescriptor | Tiled):
        shape = f"{_TYPES[value.base.dtype]}{list(value.block_shape)}"
        return f"tensordesc<{shape}{f',{value.layout!r}' if isinstance(value, Tiled) else ''}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def _resources(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
