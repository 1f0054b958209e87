"""The command `path-attention benchmark decode`: a step of decoding beside plain attention's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    pick_device,
    publish,
    say,
    words,
)
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.benchmarks.measure import stopwatch
from path_attention.nn.cache_units import unit_length
from path_attention.ops.decode import DecodeState, decode_step
from path_attention.ops.path import path_attention

KINDS = {"path": (True, False), "path_fox": (True, True), "fox": (False, True)}
KINDS["nope"] = (False, False)
ANCHORS = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
_DTYPE = torch.bfloat16
_TOGETHER = 16  # steps of one measurement
_ALLOWED = 0.01  # of the norm: six roundings


@dataclass(frozen=True, kw_only=True)
class BenchmarkDecode:
    """Time of one step (append, moves, attention, sealing) of a static cache, under a CUDA graph.

    Beside SDPA's attention alone over as many keys, in the same turn (its flash backend splits keys
    as flash decoding does), and flash-linear-attention's, without its rewriting of the keys, where
    that is installed. The tail is half a unit longer than the context when it starts. Needs an
    NVIDIA GPU. Refused unless steps agree with the definition. Writes OUT.json and OUT.png and
    prints the table.
    """

    shapes: str = (
        "1x8192x32x32x64,1x32768x32x32x64,1x131072x32x32x64,"
        "8x32768x32x32x64,8x32768x32x8x128,1x131072x32x8x128"
    )
    """Batch x context x heads x key heads x head size, with commas between."""
    encodings: str = ",".join(KINDS)
    """With commas between."""
    repeats: int = 5
    """Turns that count, of 16 steps each."""
    device: str = "auto"
    """cuda, cuda:1 …"""
    out: Path = Path("results/decode")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "decode",
            what="Milliseconds of one step of decoding under a CUDA graph: the median; as a ratio "
            "to the first candidate's in the same turn; and the slowest of the steps over a whole "
            "unit, sealing included, as a ratio to their median (worst)",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=_draw,
        )
        kept.delete()
        names = ("batch", "context", "heads", "key_heads", "size", "candidate", "ms", "ratio")
        print_rows(result, (*names, "worst"))

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """A row for each shape and candidate. ValueError on bad options or a wrong step."""
        at_least(self, repeats=1)
        if device.type != "cuda":
            raise ValueError(f"device: expected an NVIDIA GPU, got {device}")
        encodings = words("encodings", self.encodings, tuple(KINDS))
        shapes = self.shapes.split(",")
        for text in shapes:
            sizes = text.split("x")
            if len(sizes) != 5 or not all(n.isdigit() and int(n) for n in sizes):
                raise ValueError(f"shapes: expected five sizes with x between, got {text!r}")
        errors = {name: check(name, device) for name in encodings}
        report("steps agree with the definition")
        rows: list[dict[str, Any]] = []
        for text in shapes:
            batch, context, heads, key_heads, size = map(int, text.split("x"))
            shape = (batch, heads, key_heads, size)
            rows += keep(
                text, partial(self._shape, context, shape, encodings, errors, device, report)
            )
        return rows

    def _shape(
        self,
        context: int,
        shape: tuple[int, int, int, int],
        encodings: list[str],
        errors: Mapping[str, float],
        device: torch.device,
        report: Report,
    ) -> list[dict[str, Any]]:
        unit = unit_length(shape[3])
        room = context + 2 * unit + 128 + (self.repeats + 4) * _TOGETHER
        jobs = {name: anchor(name, context, shape, device) for name in ANCHORS}
        if importlib.util.find_spec("fla") is not None:
            try:
                jobs["fla_attention"] = fla_attention(context, shape, device)
            except Exception as failure:  # a peer's
                report(f"fla_attention fails here: {type(failure).__name__}")
        jobs |= {name: step(name, context, room, shape, device) for name in encodings}
        turns: dict[str, list[float]] = {name: [] for name in jobs}
        for turn in range(self.repeats + 1):
            for name, job in jobs.items():
                with stopwatch(device) as milliseconds:
                    for _ in range(_TOGETHER):
                        job()
                if turn:
                    turns[name].append(milliseconds() / _TOGETHER)
        first = turns[next(iter(jobs))]
        common = dict(zip(("batch", "heads", "key_heads", "size"), shape, strict=True))
        rows = []
        for name, job in jobs.items():
            ratio = median(t / f for t, f in zip(turns[name], first, strict=True))
            rows.append(
                {
                    **common,
                    "context": context,
                    "candidate": name,
                    "dtype": "bfloat16",
                    "repeats": self.repeats,
                    "ms": float(f"{median(turns[name]):.4g}"),
                    "ratio": float(f"{ratio:.4g}"),
                    "worst": slowest(job, unit + 64, device) if name in KINDS else None,
                    "error": float(f"{errors[name]:.2g}") if name in errors else None,
                }
            )
        return rows


def inputs(
    name: str, T: int, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[Tensor | None, ...]:
    """q, k, v, w, β, log_forget of T tokens; None what the encoding lacks."""
    batch, heads, key_heads, size = shape
    moves, fades = KINDS[name]
    rng = torch.Generator(device).manual_seed(0)

    def normal(*dims: int) -> Tensor:
        return torch.randn(batch, T, *dims, generator=rng, device=device)

    q, k, v = (normal(n, size).to(_DTYPE) for n in (heads, key_heads, key_heads))
    w = F.normalize(normal(key_heads, size), dim=-1) if moves else None
    beta = 2 * normal(key_heads).sigmoid() if moves else None
    gate = F.logsigmoid(normal(heads) + 4) if fades else None
    return q, k, v, w, beta, gate


def anchor(
    name: str, context: int, shape: tuple[int, int, int, int], device: torch.device
) -> Callable[[], object]:
    """SDPA's attention of one query a head to the context, without append, as a graph."""
    batch, heads, key_heads, size = shape
    q = torch.randn(batch, heads, 1, size, device=device, dtype=_DTYPE)
    k, v = (torch.randn(batch, key_heads, context, size, device=device).to(_DTYPE) for _ in "kv")

    def call() -> Tensor:
        with sdpa_kernel(ANCHORS[name]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != key_heads)

    return captured(call)


def step(
    name: str, context: int, room: int, shape: tuple[int, int, int, int], device: torch.device
) -> Callable[[], object]:
    """One step of a state that has seen `context` tokens, of random numbers, as a graph."""
    q, k, v, *rest = inputs(name, 1, shape, device)
    assert q is not None and k is not None and v is not None
    moves, fades = KINDS[name]
    unit = unit_length(shape[3])
    state = DecodeState.make(k, v, shape[1], room, unit, moves=moves, fades=fades)
    fill(state, context + unit // 2)

    def call() -> Tensor:
        return decode_step(state, q, k, v, *rest, scale=shape[3] ** -0.5)

    return captured(call)


def fill(state: DecodeState, seen: int) -> None:
    """As if so many tokens had been seen: random keys and values that nothing moved."""
    for x in (state.keys, state.values):
        x.normal_()
    for x in (state.high, state.products, state.tail):
        if x is not None:
            x.copy_(torch.eye(x.shape[-1], device=x.device).expand(x.shape))
    state.seen.fill_(seen)


def fla_attention(
    context: int, shape: tuple[int, int, int, int], device: torch.device
) -> Callable[[], object]:
    """flash-linear-attention's kernel for one query a head over moved keys, as a graph."""
    decoding: Any = importlib.import_module("fla.ops.attn.decoding").attn_decoding_one_step
    batch, heads, key_heads, size = shape
    q = torch.randn(1, batch, heads, size, device=device).to(_DTYPE)
    k, v = (torch.randn(1, batch * context, key_heads, size, device=device) for _ in "kv")
    k, v = k.to(_DTYPE), v.to(_DTYPE)
    borders = torch.arange(batch + 1, dtype=torch.int32, device=device) * context
    return captured(lambda: decoding(q, k, v, cu_seqlens=borders, scale=size**-0.5))


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of the call, warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        call()

    def replay(held: Callable[[], object] = call) -> None:  # what it reads must outlive it
        graph.replay()

    return replay


def slowest(job: Callable[[], object], steps: int, device: torch.device) -> float:
    """The slowest of so many steps, each timed alone, over their median."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for _ in range(3):
        job()
    marks[0].record()
    for mark in marks[1:]:
        job()
        mark.record()
    torch.cuda.synchronize(device)
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return float(f"{max(times) / median(times):.3g}")


def check(name: str, device: torch.device) -> float:
    """Relative error of steps over two sealings; ValueError if it is above six roundings."""
    shape, T, unit = (2, 4, 2, 64), 1200, 512
    q, k, v, *rest = inputs(name, T, shape, device)
    assert q is not None and k is not None and v is not None
    moves, fades = KINDS[name]
    state = DecodeState.make(k, v, shape[1], T, unit, moves=moves, fades=fades)
    outs = [
        decode_step(
            state,
            q[:, t : t + 16],
            *(None if x is None else x[:, t : t + 16] for x in (k, v, *rest)),  # pyright: ignore[reportArgumentType]
            scale=shape[3] ** -0.5,
        )
        for t in range(0, T, 16)
    ]
    wide = (None if x is None else x.double() for x in (q, k, v, *rest))
    exact = path_attention(*wide, implementation="blockwise")  # pyright: ignore[reportArgumentType]
    error = ((torch.cat(outs, 1).double() - exact).norm() / exact.norm()).item()
    if not error <= _ALLOWED:
        raise ValueError(f"decode: {name} errs by {error:.2g} of the norm, allowed {_ALLOWED}")
    return error


def _draw(result: Mapping[str, Any], path: Any) -> None:
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = result["rows"]

    def place(row: Mapping[str, Any]) -> str:
        names = ("batch", "context", "heads", "key_heads", "size")
        batch, context, heads, key_heads, size = (row[n] for n in names)
        return f"{batch} × {context:,}\n{heads}/{key_heads} heads of {size}"

    bars = {(row["candidate"], place(row)): row["ratio"] for row in rows}
    worst = {(r["candidate"], place(r)): r["worst"] for r in rows if r["worst"] is not None}
    far = max(bars.values()) > 4  # a peer; the others are all near 1
    panels = [
        Panel("one step", f"1: {rows[0]['candidate']}", bars, logarithmic=far),
        Panel("slowest step of a unit", "1: the median step", worst),
    ]
    draw_bars(panels, f"{result['device']}: decoding one token, bfloat16, CUDA graphs", path)
