"""The compiled kernels of decoding on an NVIDIA GPU: replayed steps against the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention import path_attention
from path_attention.benchmarks.inputs import swapped_inputs
from path_attention.ops.decode import DecodeState, decode_step

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
KINDS = [(False, False), (False, True), (True, False), (True, True)]
Inputs = list[Tensor | None]


def make(
    T: int,
    moves: bool,
    fades: bool,
    *,
    dtype: torch.dtype = BF16,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
) -> Inputs:
    HQ, H = heads
    q, k, v = (torch.randn(1, T, n, size, device="cuda").to(dtype) for n in (HQ, H, H))
    w = F.normalize(torch.randn(1, T, H, size, device="cuda"), dim=-1)
    beta = 2 * torch.rand(1, T, H, device="cuda")
    gate = F.logsigmoid(torch.randn(1, T, HQ, device="cuda") + 4)
    moved = [w, beta] if moves else [None, None]
    return [q, k, v, *moved, gate if fades else None]


def exact(x: Inputs, start: int, scale: float | None = None) -> Tensor:
    """The last outputs, in float64."""
    wide = [None if y is None else y.double() for y in x]
    return path_attention(*wide, scale=scale, implementation="blockwise")[:, start:]  # type: ignore[arg-type]


def replayed(x: Inputs, step: int, unit: int, scale: float | None = None) -> Tensor:
    """Every output by replays of one captured step of `step` tokens; the first runs as it is."""
    q, k, v, w, _, gate = x
    assert q is not None and k is not None and v is not None
    T = q.shape[1]
    kinds = {"moves": w is not None, "fades": gate is not None}
    state = DecodeState.make(k, v, q.shape[2], T, unit, **kinds)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    now = [None if y is None else y[:, :step].clone() for y in x]
    outs = [decode_step(state, *now, scale=scale).clone()]  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_step(state, *now, scale=scale)  # type: ignore[arg-type]
    for at in range(step, T, step):
        for y, z in zip(now, x, strict=True):
            if y is not None and z is not None:
                y.copy_(z[:, at : at + step])
        graph.replay()
        outs.append(out.clone())
    assert state.seen.tolist() == [T]
    return torch.cat(outs, 1)


def roundings(got: Tensor, right: Tensor) -> float:
    """‖error‖ in units of what rounding the exact result to got's dtype costs."""
    rounding = (right.to(got.dtype).double() - right).norm()
    return ((got.double() - right).norm() / rounding).item()


@pytest.mark.parametrize(("moves", "fades"), KINDS)
@pytest.mark.parametrize(("step", "T"), [(1, 300), (7, 700), (16, 1600)])
def test_replays_over_sealings(moves, fades, step, T):
    x = make(T, moves, fades)
    assert roundings(replayed(x, step, 64), exact(x, 0)) <= 3


@pytest.mark.parametrize("size", [16, 128, 256])
@pytest.mark.parametrize("heads", [(8, 1), (3, 3)])
def test_sizes(size, heads):
    x = make(160, True, True, heads=heads, size=size)
    assert roundings(replayed(x, 16, 64), exact(x, 0)) <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype):
    x = make(320, True, True, dtype=dtype)
    got, right = replayed(x, 16, 64), exact(x, 0)
    limit = 3 if dtype == torch.float16 else 64
    assert roundings(got, right) <= limit


def test_no_drift_after_8k_tokens():
    x = make(8192 + 1024, True, True)
    got, right = replayed(x, 16, 512), exact(x, 0)
    early, late = (
        roundings(got[:, part], right[:, part]) for part in (slice(512, 1024), slice(-512, None))
    )
    assert late <= 3 and late <= 1.5 * early


def test_swaps_are_tracked_after_16k_tokens():
    T = 16384
    x, target = swapped_inputs(T, 2, 1, 64, BF16, torch.device("cuda"))
    tensors = [x.q, x.k, x.v, x.w, x.beta, None]
    tensors = [None if y is None else y.detach() for y in tensors]
    got = replayed(tensors, 16, 512, x.scale)[:, -1024:]
    assert tensors[2] is not None
    v = tensors[2].expand(-1, -1, 2, -1)
    sought = v.gather(1, target[:, -1024:, :, None].expand(-1, -1, -1, 64))
    right = (got.sign() == sought.sign()).all(-1).float().mean().item()
    assert right >= 0.99
