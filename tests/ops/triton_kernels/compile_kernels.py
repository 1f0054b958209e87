"""Compile the operator's kernels for a device that need not be here; print what they take.

    python compile_kernels.py 90:64:path_fox:bfloat16:232448 …

Each argument is a compute capability, a head size, an encoding ("stick": the stick-breaking
kernels; "decode_path_fox" and so on: a step of decoding; "prefill_path_fox" and so on: what a chunk
takes besides the operator), a dtype and the shared memory (bytes)
that tiles are chosen for. One line of JSON a kernel: its name, shared memory and stack (where
registers spill to) in bytes, or the compiler's error. A run on CPU tensors, whose launches are
recorded and not made, says which kernels there are and what they are specialised for. It wants a
process of its own: kernels that were decorated for the interpreter do not compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
import triton
from kernel_cases import encoded
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Tiled
from triton.tools.tensor_descriptor import TensorDescriptor

from path_attention.ops.decode import DecodeState, KeyGroup, Past
from path_attention.ops.triton import (
    call,
    decode,
    hopper,
    meet,
    move,
    operator,
    ranges,
    step,
    stick_breaking,
    transport,
)

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Launches:
    """Stands in for a kernel: writes down its launches."""

    def __init__(self, kernel, seen: list):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.seen.append((self.kernel, args, kwargs))


def record(module: ModuleType, seen: list) -> None:
    for name in dir(module):
        if name.endswith("_kernel"):
            setattr(module, name, Launches(getattr(module, name), seen))


def source(kernel, args: tuple, kwargs: dict) -> ASTSource:
    """What Triton would compile for a launch: types, constants, known divisibilities."""
    bound = dict(zip([p.name for p in kernel.params], args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for n, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(n,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor | Tiled):
            shape = f"{TYPES[value.base.dtype]}{list(value.block_shape)}"
            layout = f",{value.layout!r}" if isinstance(value, Tiled) else ""
            signature[parameter.name] = f"tensordesc<{shape}{layout}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(n,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def stack(binary: bytes) -> int:
    """Bytes of a thread's stack: the registers that did not fit."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(n) for n in re.findall(r"STACK:(\d+)", text))


def launches(D: int, encoding: str, dtype: torch.dtype, shared_memory: int, seen: list) -> None:
    """One forward and backward pass of a 512-token sequence."""
    if encoding == "stick":
        q, k, v = (torch.randn(1, 512, heads, D).to(dtype) for heads in (4, 2, 2))
        out, rest, low = stick_breaking._forward(q, k, v, 0.1, None)
        stick_breaking._backward(out, rest, q, k, v, out, rest, low, 0.1, None)
        return
    call._shared_memory = lambda device: shared_memory
    if encoding.startswith("decode_"):
        q, k, v, w, beta, gate = encoded(
            encoding.removeprefix("decode_"), 1, heads=(4, 2), size=(D, D)
        )
        q, k, v = (y.to(dtype) for y in (q, k, v))
        kinds = {"moves": w is not None, "fades": gate is not None}
        state = DecodeState.make(k, v, 4, 16384, 8 * D, **kinds)
        step.triton_decode_step(state, q, k, v, w, beta, gate, None, 0.1)
        return
    if encoding.startswith("prefill_"):
        prefill(D, encoding.removeprefix("prefill_"), dtype)
        return
    warpgroups = encoding.startswith("hopper_")
    call._has_warpgroups = lambda device: warpgroups
    encoding = encoding.removeprefix("hopper_")
    x = encoded(encoding, 512, heads=(4, 2), size=(D, D))
    x = [*x.to(dtype)[:3], *x[3:]]
    out, *rest = operator._forward(*x, 0.1, None, False)
    operator._backward(out, None, *x, out, *rest, 0.1, None)


def prefill(D: int, encoding: str, dtype: torch.dtype) -> None:
    """A chunk of 512 tokens on top of a unit and a tail; what its tokens record."""
    q, k, v, w, beta, gate = encoded(encoding, 512, heads=(4, 2), size=(D, D))
    q, k, v = (y.to(dtype) for y in (q, k, v))
    suffix = transition = None
    if w is not None:
        q, *_ = transport.triton_transport(q.float(), k.float(), w, beta)
        transition = q.new_empty(1, 2, D, D)
        suffix = transition[:, None]
    total = None if gate is None else gate[:, 0]
    fade = None if total is None else total[:, None]
    unit = KeyGroup(k, v, suffix=suffix, decay=gate, unit_decay=fade, after=transition)
    tail = KeyGroup(k[:, :64], v[:, :64], decay=None if gate is None else gate[:, :64])
    decode.triton_decode(q, Past((unit,), tail, transition, total), 0.1, gate)
    state = DecodeState.make(k, v, 4, 1024, 512, moves=False, fades=False)
    kept = torch.empty(1, 2, D), torch.empty(1, state.ring_size, D), torch.empty(1, 2, 2, D)
    step.triton_record_step(state, kept[0], *kept, None)


def main() -> None:
    seen: list = []
    record(decode, seen)
    record(step, seen)
    record(move, seen)
    record(meet, seen)
    record(hopper, seen)
    record(operator, seen)
    record(ranges, seen)
    record(stick_breaking, seen)
    record(transport, seen)
    for spec in sys.argv[1:]:
        capability, D, encoding, dtype, shared_memory = spec.split(":")
        seen.clear()
        launches(int(D), encoding, getattr(torch, dtype), int(shared_memory), seen)
        target, done = GPUTarget("cuda", int(capability), 32), set()
        for kernel, args, kwargs in seen:
            options = {n: kwargs[n] for n in OPTIONS if n in kwargs}
            rest = {n: x for n, x in kwargs.items() if n not in options}
            row = {"spec": spec, "kernel": kernel.fn.__name__}
            try:
                made = triton.compile(source(kernel, args, rest), target=target, options=options)
            except Exception as error:  # of whatever pass of the compiler
                print(json.dumps({**row, "error": repr(error)[:300]}), flush=True)
                continue
            if made.hash not in done:
                used = {"shared": made.metadata.shared, "stack": stack(made.asm["cubin"])}
                print(json.dumps(row | used), flush=True)
            done.add(made.hash)


if __name__ == "__main__":
    main()
