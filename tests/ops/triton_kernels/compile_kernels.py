"""Compile the operator's kernels for a device that need not be here; print what they take.

    python compile_kernels.py 90:64:path_fox:bfloat16:232448 …

Each argument is a compute capability, a head size, an encoding ("stick": the stick-breaking
kernels, "stick_rectangle": the same over keys of other tokens; "decode_path_fox" and so on: a step
of decoding; "prefill_path_fox" and so on: what a chunk takes besides the operator), a dtype and the
shared memory (bytes)
that tiles are chosen for. One line of JSON a kernel: its name and what it takes
(`benchmarks/compiled.py`), or the compiler's error. It wants a process of its own: kernels that
were decorated for the interpreter do not compile.
"""

from __future__ import annotations

import json
import sys

import torch
from kernel_cases import encoded

from path_attention.benchmarks.compiled import compile_launch, recorded
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
    stick_rectangle,
    transport,
)


def launches(D: int, encoding: str, dtype: torch.dtype, shared_memory: int) -> None:
    """One forward and backward pass of a 512-token sequence."""
    if encoding == "stick":
        q, k, v = (torch.randn(1, 512, heads, D).to(dtype) for heads in (4, 2, 2))
        out, rest, low = stick_breaking._forward(q, k, v, 0.1, None)
        stick_breaking._backward(out, rest, q, k, v, out, rest, low, 0.1, None)
        return
    if encoding == "stick_rectangle":
        q, k, v = (torch.randn(1, 256, heads, D).to(dtype) for heads in (4, 2, 2))
        out, rest = stick_rectangle.triton_stick_rectangle(q, k, v, 0.1)
        top = out.to(dtype), rest, rest, None
        stick_rectangle.triton_stick_rectangle_backward(q, k, v, 0.1, *top)
        return
    call.shared_memory_of = lambda device: shared_memory
    if encoding.startswith("decode_"):
        q, k, v, w, beta, gate = encoded(
            encoding.removeprefix("decode_"), 1, heads=(4, 2), size=(D, D)
        )
        q, k, v = (y.to(dtype) for y in (q, k, v))
        kinds = {"moves": w is not None, "fades": gate is not None}
        for croppable in (True, False):
            state = DecodeState.make(k, v, 4, 16384, 8 * D, croppable=croppable, **kinds)
            step.triton_decode_step(state, q, k, v, w, beta, gate, None, 0.1)
        return
    if encoding.startswith("prefill_"):
        prefill(D, encoding.removeprefix("prefill_"), dtype)
        return
    warpgroups = encoding.startswith("hopper_")
    call.warpgroups_of = lambda device: warpgroups
    encoding = encoding.removeprefix("hopper_")
    x = encoded(encoding, 512, heads=(4, 2), size=(D, D))
    x = [*x.to(dtype)[:3], *x[3:]]
    out, *rest = operator._forward(*x, 0.1, None, False)
    operator._backward(out, None, *x, out, *rest, 0.1, None)


def prefill(D: int, encoding: str, dtype: torch.dtype) -> None:
    """A chunk of 512 tokens on top of a unit and a tail; what its tokens record."""
    q, k, v, w, beta, gate = encoded(encoding, 512, heads=(4, 2), size=(D, D))
    q, k, v = (y.to(dtype) for y in (q, k, v))
    own = q.clone(), q[..., 0].float()
    suffix = transition = None
    if w is not None and beta is not None:
        q, *_ = transport.triton_transport(q, k, w, beta)
        transition = q.new_empty(1, 2, D, D)
        suffix = transition[:, None]
    total = None if gate is None else gate[:, 0]
    fade = None if total is None else total[:, None]
    unit = KeyGroup(k, v, suffix=suffix, decay=gate, unit_decay=fade, after=transition)
    tail = KeyGroup(k[:, :64], v[:, :64], decay=None if gate is None else gate[:, :64])
    decode.triton_decode(q, Past((unit,), tail, transition, total), 0.1, gate, own)
    state = DecodeState.make(k, v, 4, 1024, 512, moves=False, fades=False)
    kept = torch.empty(1, 2, D), torch.empty(1, state.ring_size, D), torch.empty(1, 2, 2, D)
    step.triton_record_step(state, kept[0], *kept, None)
    step.triton_record_step(state, kept[0], kept[0], None, None, None)


MODULES = (decode, step, move, meet, hopper, operator, ranges, stick_breaking, transport)


def main() -> None:
    for spec in sys.argv[1:]:
        capability, D, encoding, dtype, shared_memory = spec.split(":")
        done = set()
        with recorded(*MODULES) as seen:
            launches(int(D), encoding, getattr(torch, dtype), int(shared_memory))
        for launch in seen:
            row = {"spec": spec, "kernel": launch.kernel.fn.__name__}
            try:
                key, used = compile_launch(launch, int(capability))
            except Exception as error:  # of whatever pass of the compiler
                print(json.dumps({**row, "error": repr(error)[:300]}), flush=True)
                continue
            if key not in done:
                print(json.dumps(row | used._asdict()), flush=True)
            done.add(key)


if __name__ == "__main__":
    main()
