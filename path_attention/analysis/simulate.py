"""The command `path-attention analyze simulate`: the theorems' claims on stylized attention.

The worst case that they speak of: every key is aligned with every query and all values are one, so
that without transport each logit is λ and distance means nothing. Transports are drawn at random:

    orthogonal      M_t uniform among orthogonal matrices
    so2             M_t turns each pair by an angle uniform in ± a (values too: so2_qkv)
    householder     M_t = I − β w wᵀ, w uniform on the sphere, β of a given law

Measured as any model's heads are (`measure`); the laws' own numbers stand beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from path_attention.analysis.analyze import parse_numbers
from path_attention.analysis.figure import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    RED,
    curve,
    finish,
)
from path_attention.analysis.measure import Probes, measure
from path_attention.analysis.routes import Routes
from path_attention.analysis.summary import Row, mean_rows, summary
from path_attention.analysis.theory import cap_tail, householder_gap, uniform_angle_gap
from path_attention.models.loading import choose_device
from path_attention.results import make_result, with_ending, write_figure, write_result

_SEGMENT = 64  # of walks: short ones show the tails at many places


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate attention under random transports and draw what the theorems say of it.

    Writes OUT.json and OUT.png: what a route leaves, how rare large far scores are, how far mass
    grows beside its bound, and how far values add up.
    """

    tokens: int = 65536
    """The longest context; orthogonal matrices, which are dense, get 4,096 at most."""
    near: int = 256
    """Tokens before a query that are near."""
    heads: int = 4
    """Independent draws that rows are means of."""
    head_size: int = 64
    """Even, at least 4."""
    tail_sizes: str = "16,64,128"
    """Head sizes at which the rarity of large scores is measured, with commas between."""
    logit: float = 4.0
    """λ, the logit of every key without transport."""
    angle: float = 0.25
    """a, the largest angle of a step in radians."""
    betas: str = "1,2,uniform"
    """Laws of β: numbers in [0, 2], or uniform on [0, 2]."""
    slope: float = 0.00390625
    """Of the one case with a distance bias (ALiBi's least slope for 8 heads)."""
    probes: int = 32
    """Queries to follow at each length."""
    seed: int = 0
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    out: Path = Path("results/simulator")
    """Where the results go, without an ending."""

    def run(self) -> None:
        device = choose_device(self.device)
        rows = self.measure(torch.device(device), lambda line: print(line, flush=True))
        result = make_result(
            what="Stylized attention under random transports, means over independent heads: rows "
            "of kind head, route (by route length), context (by tokens of context), tail (share of "
            "scores with |score| at least u times what a random one scatters by); path_attention."
            "analysis.summary says what each column is; spectral_theory is ‖E M‖ of the law",
            rows=rows,
            device=device,
        )
        write_result(with_ending(self.out, ".json"), result)
        draw(result, with_ending(self.out, ".png"))

    def measure(self, device: torch.device, report: Callable[[str], None]) -> list[Row]:
        """The rows of the result. Raises ValueError on bad options."""
        self._check()
        rows: list[Row] = []
        for name, (make, theory, tokens) in self.cases().items():
            routes = make(tokens, self.head_size, device)
            rows += self._rows(routes, {"case": name, "spectral_theory": theory})
            head = next(r for r in rows if r["case"] == name and r["kind"] == "head")
            report(
                f"{name}: ‖E M‖ {head['spectral_norm']:.4f} (law {theory:.4f}), mixing window "
                f"{head['query_window']}"
            )
        for size in self._sizes():
            routes = self._orthogonal(min(self.tokens, 2048), size, device)
            found = self._rows(routes, {"case": "orthogonal_tail", "spectral_theory": 0.0})
            rows += [row for row in found if row["kind"] == "tail"]
            report(f"tails of scores in {size} dimensions")
        return rows

    def cases(self) -> dict[str, tuple[Callable[[int, int, torch.device], Routes], float, int]]:
        """name → (what makes its routes of tokens and head size, ‖E M‖ of its law, tokens)."""
        gap = uniform_angle_gap(self.angle)
        cases: dict[str, Any] = {
            "none": (self._still, 1.0, self.tokens),
            "orthogonal": (self._orthogonal, 0.0, min(self.tokens, 4096)),
            "so2": (self._turning(), gap, self.tokens),
            "so2_qkv": (self._turning(moves_values=True), gap, self.tokens),
            "so2_alibi": (self._turning(slope=self.slope), gap, self.tokens),
        }
        for law in self.betas.split(","):
            mean = 1.0 if law == "uniform" else float(law)
            norm = householder_gap(mean, self.head_size)
            cases[f"householder_{law}"] = (self._householder(law), norm, self.tokens)
        return cases

    def _rows(self, routes: Routes, names: Mapping[str, Any]) -> list[Row]:
        lengths = [n for n in (2**p for p in range(7, 40)) if n < routes.tokens]
        lengths = [n for n in lengths if n > self.near] + [routes.tokens]
        totals = measure(
            routes, Probes.spread(lengths, self.probes, routes.tokens), self.near, _SEGMENT
        )
        size = {"head_size": routes.k.shape[2]}
        rows = mean_rows(summary(totals, lengths, self.near, **names, **size))
        kept = ("head", "route", "context", "tail")
        return [_rounded(row) for row in rows if row["kind"] in kept]

    def _aligned(self, tokens: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """q, k, v `[T, heads, size]`: every logit is λ, every value the same unit vector."""
        rng = torch.Generator().manual_seed(self.seed)
        one = torch.nn.functional.normalize(torch.randn(2, self.heads, size, generator=rng), dim=-1)
        q = (self.logit * size**0.5) ** 0.5 * one[0]
        wide = (x.to(device).expand(tokens, -1, -1) for x in (q, q, one[1]))
        return tuple(wide)

    def _still(self, tokens: int, size: int, device: torch.device) -> Routes:
        return Routes.of(*self._aligned(tokens, size, device))

    def _orthogonal(self, tokens: int, size: int, device: torch.device) -> Routes:
        rng = torch.Generator(device).manual_seed(self.seed + 1)
        drawn = torch.randn(tokens, self.heads, size, size, generator=rng, device=device)
        q, r = torch.linalg.qr(drawn)
        # QR is unique, and q uniform, once r's diagonal is positive (Mezzadri 2007).
        matrices = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        return Routes.of(*self._aligned(tokens, size, device), matrices=matrices)

    def _turning(
        self, *, moves_values: bool = False, slope: float = 0.0
    ) -> Callable[[int, int, torch.device], Routes]:
        def make(tokens: int, size: int, device: torch.device) -> Routes:
            rng = torch.Generator(device).manual_seed(self.seed + 2)
            shape = (tokens, self.heads, size // 2)
            angles = (2 * torch.rand(shape, generator=rng, device=device) - 1) * self.angle
            q, k, v = self._aligned(tokens, size, device)
            decay = q.new_full((tokens, self.heads), -slope) if slope else None
            return Routes.of(q, k, v, angles=angles, log_forget=decay, moves_values=moves_values)

        return make

    def _householder(self, law: str) -> Callable[[int, int, torch.device], Routes]:
        def make(tokens: int, size: int, device: torch.device) -> Routes:
            rng = torch.Generator(device).manual_seed(self.seed + 3)
            w = torch.randn(tokens, self.heads, size, generator=rng, device=device)
            if law == "uniform":
                beta = 2 * torch.rand(tokens, self.heads, generator=rng, device=device)
            else:
                beta = w.new_full((tokens, self.heads), float(law))
            w = torch.nn.functional.normalize(w, dim=-1)
            return Routes.of(*self._aligned(tokens, size, device), w=w, beta=beta)

        return make

    def _sizes(self) -> list[int]:
        return parse_numbers("tail_sizes", self.tail_sizes)

    def _check(self) -> None:
        least = {"heads": 1, "near": 1, "probes": 1, "tokens": 2 * self.near}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}: expected at least {low}, got {getattr(self, name)}")
        if self.head_size < 4 or self.head_size % 2:
            raise ValueError(f"head_size: expected an even size from 4 on, got {self.head_size}")
        for name in ("logit", "angle", "slope"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if min(self._sizes()) < 2:
            raise ValueError(f"tail_sizes: expected at least 2 each, got {self.tail_sizes!r}")
        for law in self.betas.split(","):
            if law != "uniform" and not _in_range(law):
                raise ValueError(f"betas: expected uniform or numbers from 0 to 2, got {law!r}")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the command as a PNG: the four mechanisms."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(11, 8.2), layout="constrained", dpi=130)
    (routes, tails), (mass, values) = figure.subplots(2, 2)
    _draw_routes(routes, rows)
    _draw_tails(tails, [row for row in rows if row["case"] == "orthogonal_tail"])
    _draw_mass(mass, rows)
    _draw_values(values, rows)
    for axes in (routes, tails, mass, values):
        finish(axes)
    near = next(row["near"] for row in rows if row["kind"] == "head")
    figure.suptitle(
        "Attention under random transports: every key aligned, every value the same "
        f"(far: {near:,} tokens or more before the query)",
        fontsize=11,
    )
    write_figure(figure, path)


def _draw_routes(axes: Any, rows: Sequence[Row]) -> None:
    colours = (BLUE, RED, GREEN, PURPLE, "#E69F00", "#000000")
    cases = dict.fromkeys(row["case"] for row in rows if row["kind"] == "route")
    cases = [name for name in cases if name not in ("none", "so2_qkv", "so2_alibi")]
    for n, name in enumerate(cases):
        mine = [
            {**row, "theory_power": row["spectral_theory"] ** row["length"]}
            for row in rows
            if row["case"] == name and row["kind"] == "route" and row["length"]
        ]
        curve(axes, mine, "kept_product", name.replace("_", ", β "), colours[n % 6], "-")
        curve(axes, mine, "theory_power", "", colours[n % 6], ":")
        if name.startswith("householder"):
            curve(axes, mine, "kept_norm", "", colours[n % 6], "--")
    axes.plot([], [], ":", color=GREY, label="‖E M‖ⁿ of the law")
    axes.plot([], [], "--", color=GREY, label="norm left (householder)")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="route length n, tokens", ylabel="⟨M ⋯ M q, q⟩ / ‖q‖², mean")
    axes.set_title("1. a spectral gap: routes decorrelate, whatever the context's length")


def _draw_tails(axes: Any, rows: Sequence[Row]) -> None:
    for size, colour in zip(sorted({row["head_size"] for row in rows}), (BLUE, RED, GREEN, PURPLE),
                            strict=False):  # fmt: skip
        mine = [
            {**row, "cosine": row["u"] / size**0.5}
            for row in rows
            if row["head_size"] == size and row["far_share"]
        ]
        label = f"measured, {size} dimensions"
        curve(axes, mine, "far_share", label, colour, "-", x="cosine", marker="o")
        at = [n / 200 for n in range(201)]
        bound = [cap_tail(x * size**0.5) for x in at]
        axes.plot(at, bound, ":", color=colour, linewidth=1.2)
    axes.plot([], [], ":", color=GREY, label="bound 2 e^(−d t²/2)")
    axes.set_yscale("log")
    axes.set_ylim(1e-6, 1.5)
    axes.set(xlabel="t", ylabel="share of far scores with |cosine| ≥ t")
    axes.set_title("2. concentration: a large far score is exponentially rare in d")


def _draw_mass(axes: Any, rows: Sequence[Row]) -> None:
    named = {"none": GREY, "so2": RED, "householder_2": BLUE, "so2_alibi": GREEN}
    for name, colour in named.items():
        mine = [row for row in rows if row["case"] == name and row["kind"] == "context"]
        curve(axes, mine, "far_mass", name.replace("_", ", "), colour, "-", marker="o")
        curve(axes, mine, "bound", "", colour, ":")
    axes.plot([], [], ":", color=GREY, label=r"bound $M/(M + K e^{2\lambda})$")
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    axes.set(xlabel="tokens of context", ylabel="share of attention on far keys")
    axes.set_title("3. bounded logits: far keys win in the end, unless distance costs")


def _draw_values(axes: Any, rows: Sequence[Row]) -> None:
    for name, label, colour in (
        ("so2", "queries and keys turn", RED),
        ("so2_qkv", "values turn too", BLUE),
    ):
        mine = [row for row in rows if row["case"] == name and row["kind"] == "context"]
        curve(axes, mine, "in_step", label, colour, "-", marker="o")
        curve(axes, mine, "incoherent", "", colour, ":")
    axes.plot([], [], ":", color=GREY, label="random directions, √Σa²‖v‖² / Σa‖v‖")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens of context", ylabel="‖Σ a v‖ / Σ a ‖v‖ of far values")
    axes.set_title("4. moved values: far ones add up out of step")


def _in_range(law: str) -> bool:
    try:
        return 0 <= float(law) <= 2
    except ValueError:
        return False


def _rounded(row: Row) -> Row:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
