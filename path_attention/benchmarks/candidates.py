"""What the operator's benchmark compares: our implementations, anchors, and peers if installed.

A candidate is a name, the encodings that it computes, and `make(inputs, encoding)`, which returns a
function without arguments whose result is the output `[B, T, HQ, D]`. Encodings: "path" (transport
by Householder factors), "path_fox" (and a forget gate), "fox" (the gate alone), "nope" (neither).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from path_attention.ops.path import IMPLEMENTATIONS, path_attention

ENCODINGS = ("path", "path_fox", "fox", "nope")
Call = Callable[[], Tensor]


class Inputs(NamedTuple):
    """Leaves that require gradients: q, k, v of the benchmark's dtype; w, β, gate in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    log_forget: Tensor

    def used_by(self, encoding: str) -> list[Tensor]:
        """The tensors that an encoding reads."""
        transport = [self.w, self.beta] if encoding.startswith("path") else []
        gate = [self.log_forget] if encoding.endswith("fox") else []
        return [self.q, self.k, self.v, *transport, *gate]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the comparison.

    Attributes:
        name: as in the results.
        encodings: that it computes, of `ENCODINGS`.
        make: (inputs, encoding) → the call to time.
        devices: "cpu", "cuda", or both.
        module: that it needs besides torch, or None.
        ours: held to the definition; the benchmark refuses to run if it fails. A peer's error is
            written beside its time.
    """

    name: str
    encodings: tuple[str, ...]
    make: Callable[[Inputs, str], Call]
    devices: tuple[str, ...] = ("cuda",)
    module: str | None = None
    ours: bool = False

    def runs_on(self, device_type: str) -> bool:
        """Whether it can run here: the device is one of its own, its module is installed."""
        installed = self.module is None or importlib.util.find_spec(self.module) is not None
        return device_type in self.devices and installed


def candidates(device_type: str) -> list[Candidate]:
    """All candidates for a device; the first one is the anchor that ratios refer to."""
    return [c for c in _CANDIDATES if c.runs_on(device_type)]


def _ours(name: str) -> Callable[[Inputs, str], Call]:
    def make(x: Inputs, encoding: str) -> Call:
        w, beta = (x.w, x.beta) if encoding.startswith("path") else (None, None)
        log_forget = x.log_forget if encoding.endswith("fox") else None
        return lambda: path_attention(x.q, x.k, x.v, w, beta, log_forget, implementation=name)

    return make


def _sdpa(*backends: SDPBackend) -> Callable[[Inputs, str], Call]:
    def make(x: Inputs, encoding: str) -> Call:
        def call() -> Tensor:
            q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
            grouped = q.shape[1] != k.shape[1]
            with sdpa_kernel(list(backends)):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out.transpose(1, 2)

        return call

    return make


def _flex_attention(x: Inputs, encoding: str) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T = x.q.shape[1]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=x.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
        out = compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return call


def _fla(x: Inputs, encoding: str) -> Call:
    """flash-linear-attention's operators, which multiply PaTH-FoX's gate by the scale."""
    if encoding == "fox":
        fox = importlib.import_module("fla.ops.forgetting_attn").parallel_forgetting_attn
        return lambda: fox(x.q, x.k, x.v, x.log_forget)
    path = importlib.import_module("fla.ops.path_attn.parallel").parallel_path_attn
    scale = x.q.shape[3] ** -0.5
    if encoding == "path":
        return lambda: path(x.q, x.k, x.v, x.w, x.beta, None, scale)[0]
    return lambda: path(x.q, x.k, x.v, x.w, x.beta, x.log_forget / scale, scale)[0]


_CANDIDATES = (
    Candidate(
        name="sdpa",
        encodings=("nope",),
        make=_sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
        devices=("cpu",),
    ),
    Candidate(name="sdpa_cudnn", encodings=("nope",), make=_sdpa(SDPBackend.CUDNN_ATTENTION)),
    Candidate(name="sdpa_flash", encodings=("nope",), make=_sdpa(SDPBackend.FLASH_ATTENTION)),
    Candidate(name="flex_attention", encodings=("nope",), make=_flex_attention),
    Candidate(name="fla", encodings=("path", "path_fox", "fox"), make=_fla, module="fla"),
    *(
        Candidate(
            name=name,
            encodings=ENCODINGS,
            make=_ours(name),
            devices=("cuda",) if name == "triton" else ("cpu", "cuda"),
            module="triton" if name == "triton" else None,
            ours=True,
        )
        for name in IMPLEMENTATIONS
        if name != "definition"
    ),
)
