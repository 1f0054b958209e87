"""The command `path-attention analyze swaps`: how long the construction keeps track of items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from path_attention.analysis.construction import (
    exact_until,
    make_sequence,
    right_answers,
    swap_tracker,
)
from path_attention.models.loading import choose_device
from path_attention.results import make_result, with_ending, write_figure, write_result

_PARTS = 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class AnalyzeSwaps:
    """Swaps that one PaTH layer with hand-set weights tracks, by the bound on β and the dtype.

    Questions and claims come in pairs all along one sequence of random swaps; an answer is right if
    the model's likeliest token is. Writes OUT.json and OUT.png and prints the table.
    """

    swaps: int = 100_000
    """Swaps in the sequence."""
    every: int = 500
    """A question and a claim after each so many swaps."""
    beta_max: str = "2,1.9999,1.999,1.9921875,1"
    """Bounds on β, with commas between."""
    dtypes: str = "float32,bfloat16"
    """Of the model, with commas between: float32, bfloat16."""
    seeds: int = 3
    """Sequences, from seed 0 on."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    out: Path = Path("results/tracked_swaps")
    """Where the results go, without an ending."""

    def run(self) -> None:
        device = choose_device(self.device)
        rows = self.measure(torch.device(device), lambda line: print(line, flush=True))
        result = make_result(
            what="Share of right answers of one PaTH layer with hand-set weights that tracks five "
            "items under swaps, in the part of the sequence that ends after so many swaps; and the "
            "last number of swaps, of those asked at, up to which all are right",
            rows=rows,
            device=device,
        )
        write_result(with_ending(self.out, ".json"), result)
        draw(result, with_ending(self.out, ".png"))

    def measure(self, device: torch.device, report: Callable[[str], None]) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options."""
        try:
            bounds = [float(word) for word in self.beta_max.split(",")]
        except ValueError:
            raise ValueError(
                f"beta_max: expected numbers with commas between, got {self.beta_max!r}"
            ) from None
        names = [word.strip() for word in self.dtypes.split(",")]
        for name in names:
            if name not in _DTYPES:
                raise ValueError(f"dtypes: expected some of {', '.join(_DTYPES)}, got {name!r}")
        if self.seeds < 1:
            raise ValueError(f"seeds: expected at least 1, got {self.seeds}")
        if self.every > self.swaps:
            raise ValueError(f"every: expected at most {self.swaps} swaps, got {self.every}")
        rows = []
        for bound in bounds:
            for name in names:
                model: Any = swap_tracker(bound)
                model.to(device=device, dtype=_DTYPES[name])
                for seed in range(self.seeds):
                    rng = torch.Generator().manual_seed(seed)
                    sequence = make_sequence(self.swaps, self.every, rng)
                    right = right_answers(model, sequence)
                    exact = exact_until(sequence, right)
                    parts = zip(sequence.swaps.chunk(_PARTS), right.chunk(_PARTS), strict=True)
                    rows += [
                        {
                            "beta_max": bound,
                            "dtype": name,
                            "seed": seed,
                            "swaps": int(swaps[-1]),
                            "answers": len(share),
                            "right": share.double().mean().item(),
                            "exact_until": exact,
                        }
                        for swaps, share in parts
                    ]
                    report(
                        f"beta_max {bound:g}, {name}, seed {seed}: "
                        f"{right.double().mean():.4f} right, all of them up to {exact} swaps"
                    )
        return rows


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the command as a PNG: share of right answers along the sequence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    rows = result["rows"]
    kinds = list(dict.fromkeys((row["beta_max"], row["dtype"]) for row in rows))
    bounds = list(dict.fromkeys(bound for bound, _ in kinds))
    for bound, name in kinds:
        own = [r for r in rows if (r["beta_max"], r["dtype"]) == (bound, name)]
        places = sorted({r["swaps"] for r in own})
        shares = [[r["right"] for r in own if r["swaps"] == place] for place in places]
        style = "-" if name == "float32" else ":"
        axes.plot(
            places,
            [sum(x) / len(x) for x in shares],
            style,
            color=f"C{bounds.index(bound)}",
            label=f"β ≤ {bound:.6g}, {name}",
        )
    axes.set_xlabel("swaps")
    axes.set_ylabel("share of right answers")
    axes.set_ylim(0, 1.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title("One PaTH layer with hand-set weights: five items under swaps")
    write_figure(figure, path)
