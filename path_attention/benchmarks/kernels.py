"""The command `path-attention benchmark kernels`: what the operator's kernels take of a device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure

from path_attention.benchmarks.candidates import ENCODINGS
from path_attention.benchmarks.comparison import publish, words
from path_attention.benchmarks.inputs import make_inputs
from path_attention.results import write_figure

_SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may have
_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class BenchmarkKernels:
    """Registers, spills, shared memory and matrix instructions of each kernel of the Triton
    operator, forward and backward in bfloat16. Compiles them; needs no GPU.

    Writes OUT.json and OUT.png and prints the table.
    """

    capability: int = 90
    """Compute capability to compile for: 80, 86, 89, 90, 100 or 120."""
    sizes: str = "64,128"
    """Head sizes, with commas between."""
    encodings: str = "path,path_fox"
    """Of path, path_fox, fox, nope, alibi, with commas between."""
    loops: str = "portable,hopper"
    """Main loops: portable, hopper (for capability 90), with commas between."""
    out: Path = Path("results/kernels")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ValueError("TRITON_INTERPRET: expected not to be set, got 1: it compiles nothing")
        if self.capability not in _SHARED_MEMORY:
            known = ", ".join(map(str, _SHARED_MEMORY))
            raise ValueError(f"capability: expected one of {known}, got {self.capability}")
        result = publish(
            self,
            "kernels",
            what="What a program of each of the Triton operator's kernels takes, compiled for "
            f"compute capability {self.capability / 10}: registers a thread, bytes a thread that "
            "registers spill to, bytes of shared memory, matrix instructions in its code",
            rows=list(self._rows()),
            device=torch.device("cpu"),
            draw=_draw,
        )
        columns = ("size", "encoding", "loops", "kernel", "registers", "stack", "shared", "wgmma")
        print_rows(result, columns)

    def _rows(self) -> Iterator[dict[str, Any]]:
        encodings = words("encodings", self.encodings, ENCODINGS)
        loops = words("loops", self.loops, ("portable", "hopper"))
        if "hopper" in loops and self.capability != 90:
            loops = [name for name in loops if name != "hopper"]
        if not loops:
            raise ValueError(
                f"loops: expected portable with capability {self.capability}, got {self.loops!r}"
            )
        sizes = [int(size) for size in words("sizes", self.sizes, ("64", "128", "256"))]
        for size in sizes:
            for encoding in encodings:
                for name in loops:
                    seen = set()
                    for row in self._kernels(size, encoding, name):
                        here = {"size": size, "encoding": encoding, "loops": name, **row}
                        key = tuple(here.values())
                        if key not in seen and (name == "portable" or "hopper" in row["kernel"]):
                            yield here
                        seen.add(key)

    def _kernels(self, size: int, encoding: str, loops: str) -> Iterator[dict[str, Any]]:
        from path_attention.benchmarks.compiled import compile_launch, recorded
        from path_attention.ops.triton import call, hopper, meet, move, operator, ranges

        x = make_inputs(1, _TOKENS, 2, 2, size, torch.bfloat16, torch.device("cpu"))
        gated = (*x[:3], None, None, x[5])
        used = {"path": x[:5], "path_fox": x[:6], "fox": gated, "alibi": gated}
        inputs = (*used.get(encoding, x[:3]), None, None, None)[:6]
        memory = _SHARED_MEMORY[self.capability] * 1024
        with (
            recorded(hopper, meet, move, operator, ranges) as launches,
            mock.patch.object(call, "shared_memory_of", lambda device: memory),
            mock.patch.object(call, "warpgroups_of", lambda device: loops == "hopper"),
        ):
            out, *rest = operator._forward(*inputs, 0.1, None, False)
            operator._backward(out, None, *inputs, out, *rest, 0.1, None)
        for launch in launches:
            name = launch.kernel.fn.__name__.removesuffix("_kernel")
            yield {"kernel": name, **compile_launch(launch, self.capability)[1]._asdict()}


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """What each kernel takes, a bar for each head size; with gates if they were asked for."""
    rows = result["rows"]
    encoding = max((r["encoding"] for r in rows), key=lambda e: (e == "path_fox", e == "path"))
    rows = [r for r in rows if r["encoding"] == encoding]
    names = list(dict.fromkeys(r["kernel"] for r in rows))
    sizes = sorted({r["size"] for r in rows})
    figure = Figure(figsize=(11, 0.33 * len(names) + 1.6), layout="constrained", dpi=150)
    panels = figure.subplots(1, 3, sharey=True)
    titles = ("registers a thread", "bytes spilled a thread", "KiB of shared memory")
    height = 0.8 / len(sizes)
    for axes, column, title in zip(panels, ("registers", "stack", "shared"), titles, strict=True):
        unit = 1024 if column == "shared" else 1
        for n, size in enumerate(sizes):
            found = {r["kernel"]: max(r[column], 0) / unit for r in rows if r["size"] == size}
            at = [i + (n - (len(sizes) - 1) / 2) * height for i in range(len(names))]
            axes.barh(at, [found.get(k, 0) for k in names], height, label=f"head size {size}")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    panels[-1].legend(frameon=False, fontsize=8)
    capability = re.findall(r"capability (\S+):", result["what"])[0]
    figure.suptitle(
        f"Kernels compiled for compute capability {capability}, {encoding}", fontsize=10
    )
    write_figure(figure, path)
