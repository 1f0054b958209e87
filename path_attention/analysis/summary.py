"""Rows of what was measured: by head, by route length, by context, and distributions of scores.

A row's `kind` says which; columns of each kind are in the function that makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from path_attention.analysis.measure import EDGES, SCORES, TAILS, Totals
from path_attention.analysis.theory import cap_tail, length_of_half

Row = dict[str, Any]
QUANTILES = (0.05, 0.5, 0.95)


def summary(
    totals: Totals, lengths: Sequence[int], near: int, *, level: float = 0.2, **names: Any
) -> list[Row]:
    """Rows of one layer's heads.

    Args:
        totals: of `measure`, over any number of sequences.
        lengths: those of the probes.
        near: K.
        level: what a score's correlation must stay below behind the mixing window, in (0, 1).
        names: columns that every row gets, as the layer's number.

    Raises:
        ValueError: naming level.
    """
    check_level(level)
    rows: list[Row] = []
    heads = totals.sums["products"].shape[1]
    for head in range(heads):
        own = {**names, "head": head}
        routes = list(route_rows(totals, head))
        contexts = list(context_rows(totals, head, lengths, level))
        rows.append(head_row(totals, head, routes, contexts, near, level) | own)
        for kind in (routes, contexts, score_rows(totals, head), tail_rows(totals, head)):
            rows += [row | own for row in kind]
    return [{"kind": row["kind"], **names, "head": row["head"], **row} for row in rows]


def check_level(level: float) -> None:
    """Raise ValueError unless 0 < level < 1."""
    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")


def head_row(
    totals: Totals,
    head: int,
    routes: Sequence[Row],
    contexts: Sequence[Row],
    near: int,
    level: float,
) -> Row:
    """One head.

    spectral_norm: ‖E M‖, the largest singular value; spectral_mean: tr(E M)/D, what one step leaves
    of a direction on average; norm_window: ln level / ln ‖E M‖, the window that the norm promises.
    mixing_window: the route length from which on a score's correlation with itself, unmoved, stays
    below level; query_window: the same of a query. norm_bound: scale · max ‖q‖ · max ‖k‖;
    score_most: the greatest |score| met, decay apart. half_by_bound: the context at which the bound
    is 1/2 with the λ of the shortest context that has far keys; half_by_gap: the same for what near
    logits stand above far ones on average.
    """
    norm = mean = None
    if "transport" in totals.sums:
        each = totals.sums["transport"] / totals.sums["transports"]
        heads = totals.sums["products"].shape[1]
        own = each[head // (heads // len(each))]
        norm = float(torch.linalg.matrix_norm(own, 2))
        mean = float(own.trace() / len(own))
    first = next((row for row in contexts if row["far_mass"] is not None), None)
    halves = {}
    for name, column in (("half_by_bound", "spread"), ("half_by_gap", "gap")):
        at = None if first is None or first[column] is None else first[column]
        halves[name] = None if at is None else _finite(length_of_half(near, at))
    return {
        "kind": "head",
        "near": near,
        "level": level,
        "spectral_norm": norm,
        "spectral_mean": mean,
        "norm_window": _norm_window(norm, level),
        "mixing_window": window(routes, "score_correlation", level),
        "query_window": window(routes, "kept_product", level),
        "norm_bound": float(totals.most["norm_bound"][head]),
        "score_most": float(totals.most["score_most"][head]),
        **halves,
        **_near_and_far(totals, head),
    }


def window(rows: Sequence[Row], column: str, level: float) -> int | None:
    """The least route length from which on |column| stays below level; None if there is none."""
    found = None
    for row in sorted(rows, key=lambda row: row["length"], reverse=True):
        value = row[column]
        if value is None:
            continue
        if abs(value) >= level:
            break
        found = row["length"]
    return found


def route_rows(totals: Totals, head: int) -> Iterator[Row]:
    """By route length (from `length` on, to the next row's).

    kept_norm: √ E ‖M ⋯ M q‖²/‖q‖²; kept_cosine: E cos(M ⋯ M q, q), the direction alone;
    kept_product: E ⟨M ⋯ M q, q⟩/‖q‖², both. score_correlation: Σ s s₀ / √(Σ s² Σ s₀²) of moved and
    unmoved scores s, s₀; score_norm: √(Σ s²/Σ s₀²). norm_power: ‖E M‖ⁿ. mass: share of attention at
    the longest context.
    """
    sums = totals.sums
    count, pairs = sums.get("kept_count"), sums["pairs"].sum(0)
    count = None if count is None else count.sum(0)
    products = sums["products"][:, head].sum(1)
    longest = sums["mass"][head, -1] / sums["probes"][-1]
    norm = None
    if "transport" in sums:
        each = sums["transport"] / sums["transports"]
        own = each[head // (sums["products"].shape[1] // len(each))]
        norm = float(torch.linalg.matrix_norm(own, 2))
    for n, length in enumerate(EDGES.tolist()):
        if not pairs[n]:
            continue
        ss, bare, both = (float(x) for x in products[:, n])
        row: Row = {
            "kind": "route",
            "length": length,
            "score_correlation": both / math.sqrt(ss * bare) if ss * bare > 0 else None,
            "score_norm": math.sqrt(ss / bare) if bare > 0 else None,
            "norm_power": None if norm is None else norm**length,
            "mass": float(longest[n]),
        }
        kept: dict[str, float | None] = dict.fromkeys(("kept_norm", "kept_cosine", "kept_product"))
        if count is not None and count[n]:
            square, cosine, product = (
                float(sums[f"kept_{name}"][head, :, n].sum() / count[n])
                for name in ("square", "cosine", "product")
            )
            kept = {
                "kept_norm": math.sqrt(square),
                "kept_cosine": cosine,
                "kept_product": product,
            }
        yield row | kept


def context_rows(totals: Totals, head: int, lengths: Sequence[int], level: float) -> Iterator[Row]:
    """By context length; means over probes, None where no key is far.

    far_mass beside its bound M/(M + K e^{2λ}); spread: 2λ, the largest near logit less the least
    far one; gap: log-mean-exp of near logits less that of far ones; gap_most: the largest near one
    less the largest far one. in_step: ‖Σ a v‖ / Σ a ‖v‖ over far values; incoherent: the same for
    random directions, √(Σ a² ‖v‖²) / Σ a ‖v‖; coherence: ‖Σ a v‖ / √(Σ a² ‖v‖²). mixing_window
    and query_window: as in `head_row`, of the queries of this context alone.
    """
    names = ("far_keys", "far_mass", "bound", "spread", "gap", "gap_most")
    names += ("in_step", "incoherent", "coherence")
    for n, length in enumerate(lengths):
        count = float(totals.sums["with_far"][n])
        row: Row = {"kind": "context", "length": length}
        for name in names:
            known = count and name in totals.sums
            row[name] = _finite(float(totals.sums[name][head, n]) / count) if known else None
        ss, bare, both = totals.sums["products"][:, head, n]
        correlation = (both / (ss * bare).sqrt()).nan_to_num()
        row["mixing_window"] = _window(correlation, totals.sums["pairs"][n], level)
        row["query_window"] = None
        if "kept_count" in totals.sums:
            count = totals.sums["kept_count"][n]
            kept = totals.sums["kept_product"][head, n] / count.clamp(min=1)
            row["query_window"] = _window(kept, count, level)
        yield row


def _window(correlation: Tensor, count: Tensor, level: float) -> int | None:
    """`window` of a correlation by bin, where anything was met."""
    met = count > 0
    steps = zip(EDGES[met].tolist(), correlation[met].tolist(), strict=True)
    rows = [{"length": length, "correlation": c} for length, c in steps]
    return window(rows, "correlation", level)


def score_rows(totals: Totals, head: int) -> Iterator[Row]:
    """Distribution of scores, decay apart: the shares of near and of far ones between two scores.

    None is an end without a bound.
    """
    counts = totals.sums["histogram"][head]
    whole = counts.sum(1).clamp(min=1)
    edges = [None, *SCORES.tolist(), None]
    for n in range(counts.shape[1]):
        if counts[:, n].any():
            near, far = (counts[:, n] / whole).tolist()
            yield {"kind": "scores", "above": edges[n], "below": edges[n + 1]} | {
                "near_share": near,
                "far_share": far,
            }


def tail_rows(totals: Totals, head: int) -> Iterator[Row]:
    """Shares of |score| at least u times what a random one scatters by, beside 2 e^{−u²/2}.

    That is ‖q‖‖k‖/√d (`cap_tail`); for rotations √(Σ |q_n|²|k_n|²) over pairs (`hoeffding_tail`),
    which is √2 times what random phases scatter by.
    """
    counts = totals.sums["tails"][head]
    beyond = counts.flip(1).cumsum(1).flip(1)[:, 1:]
    whole = counts.sum(1)
    for n, u in enumerate(TAILS.tolist()):
        shares = [float(b / w) if w else None for b, w in zip(beyond[:, n], whole, strict=True)]
        yield {"kind": "tail", "u": u, "near_share": shares[0], "far_share": shares[1]} | {
            "tail_bound": float(cap_tail(u))
        }


def _near_and_far(totals: Totals, head: int) -> Row:
    """Mean, deviation and quantiles of near and of far scores, decay apart."""
    row: Row = {}
    count, total, square = totals.sums["moments"][:, head]
    for n, where in enumerate(("near", "far")):
        known = bool(count[n])
        mean = float(total[n] / count[n]) if known else None
        row[f"{where}_mean"] = mean
        spread = max(float(square[n] / count[n]) - mean**2, 0) if mean is not None else None
        row[f"{where}_deviation"] = None if spread is None else math.sqrt(spread)
        for q in QUANTILES:
            at = _quantile(totals.sums["histogram"][head, n], q) if known else None
            row[f"{where}_q{round(100 * q):02}"] = at
    return row


def _quantile(counts: Tensor, q: float) -> float:
    """Of a histogram over SCORES, linear inside a bin."""
    upto = counts.cumsum(0) / counts.sum()
    n = int((upto < q).sum())
    edges = [float(SCORES[0]), *SCORES.tolist(), float(SCORES[-1])]
    before = float(upto[n - 1]) if n else 0.0
    inside = (q - before) / max(float(upto[n]) - before, 1e-300)
    return edges[n] + inside * (edges[n + 1] - edges[n])


def _norm_window(norm: float | None, level: float) -> float | None:
    """Where ‖E M‖ⁿ falls to level; None without a gap."""
    if norm is None or norm >= 1 - 1e-9:
        return None
    return 0.0 if norm == 0 else math.log(level) / math.log(norm)


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def mean_rows(rows: Sequence[Row], over: Sequence[str] = ("head",)) -> list[Row]:
    """Means over heads of rows that else have the same names; None where a head has none.

    A head without a row for a bin of scores has a share of 0 there. head becomes the number of
    heads; the other columns that the means are `over` are left out.
    """
    keys = [key for key in ("layer", "length", "u", "above", "below") if key not in over]
    heads: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        words = [(k, v) for k, v in row.items() if isinstance(v, str)]
        whole = (*words, None if "layer" in over else row.get("layer"))
        heads.setdefault(whole, set()).add(tuple(row[key] for key in over))
        groups.setdefault((whole, *(row.get(key) for key in keys)), []).append(row)
    means = []
    for (whole, *_), group in groups.items():
        row: Row = {"head": len(heads[whole])}
        for name in group[0].keys() - set(over):
            values = [each[name] for each in group]
            if name.endswith("_share") and None not in values:
                row[name] = sum(values) / row["head"]
            elif len(set(values)) == 1:
                row[name] = values[0]
            else:
                row[name] = None if None in values else sum(values) / len(values)
        means.append({name: row[name] for name in group[0] if name in row})
    return means
