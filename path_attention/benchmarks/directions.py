"""Memory traffic of the Householder directions, forward and backward, beside a plain copy.

`python -m path_attention.benchmarks.directions` prints it for the implementations on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from path_attention.benchmarks.measure import stopwatch
from path_attention.ops.directions import householder_directions

_CALLS = 10


def directions_bandwidth(
    *,
    tokens: int = 16384,
    heads: int = 32,
    size: int = 64,
    width: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    implementation: str | None = None,
    repeats: int = 20,
) -> list[dict[str, str | float]]:
    """Bytes that must move over the time taken, and that as a part of what a copy reaches.

    The forward reads x and writes w; the backward reads x and dw and writes dx; the taps are not
    counted. The copy reads and writes as many bytes as the forward and takes turns with it. The
    backward's time is that of both less the forward's. On a GPU ten calls are one CUDA graph, so
    that launches cost nothing; the first turn warms up.

    Args:
        tokens: T of x `[1, T, H · D]`; with the default sizes nothing stays in an L2 cache.
        heads: H.
        size: D.
        width: K, the convolution's width.
        dtype: of x; weight and dw are float32.
        device: where.
        implementation: as in `householder_directions`.
        repeats: turns that count; medians are returned.

    Returns:
        Rows of "pass" ("copy", "forward", "backward"), "ms", "gb_per_s" and "of_copy".
    """
    device = torch.device(device)
    rng = torch.Generator(device).manual_seed(0)
    channels = heads * size
    x = torch.randn(1, tokens, channels, generator=rng, device=device).to(dtype)
    weight = torch.randn(channels, width, generator=rng, device=device)
    grad_out = torch.randn(1, tokens, heads, size, generator=rng, device=device)
    traffic = {
        "copy": x.nbytes + grad_out.nbytes,
        "forward": x.nbytes + grad_out.nbytes,
        "backward": 2 * x.nbytes + grad_out.nbytes,
    }
    source = torch.zeros(traffic["copy"] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def forward() -> torch.Tensor:
        return householder_directions(x, weight, heads, implementation=implementation)

    calls = {
        "copy": _repeated(lambda: target.copy_(source), device),
        "forward": _repeated(forward, device),
        "both": _repeated(lambda: torch.autograd.grad(forward(), leaves, grad_out), device),
    }
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            with stopwatch(device) as milliseconds:
                call()
            if turn:
                turns[name].append(milliseconds() / _CALLS)
    ms = {name: median(taken) for name, taken in turns.items()}
    ms["backward"] = median(b - f for b, f in zip(turns["both"], turns["forward"], strict=True))
    speed = {name: count / ms[name] / 1e6 for name, count in traffic.items()}
    return [
        {
            "pass": name,
            "ms": float(f"{ms[name]:.4g}"),
            "gb_per_s": float(f"{speed[name]:.4g}"),
            "of_copy": float(f"{speed[name] / speed['copy']:.3g}"),
        }
        for name in traffic
    ]


def _repeated(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The call ten times over; on a GPU as one CUDA graph."""

    def repeated() -> None:
        for _ in range(_CALLS):
            call()

    if device.type != "cuda":
        return repeated
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated()
    return graph.replay


if __name__ == "__main__":
    for chosen in ("triton", "torch"):
        for row in directions_bandwidth(implementation=chosen):
            print(f"{chosen:<7}", "  ".join(f"{name} {value}" for name, value in row.items()))
