"""What is measured, against the same thing written out in float64, and against known laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from literal_routes import make_inputs, matrices, of_query, pairs
from torch.nn import functional as F

from path_attention.analysis.measure import EDGES, SCORES, Probes, Totals, measure
from path_attention.analysis.routes import Routes, walk
from path_attention.analysis.summary import mean_rows, summary
from path_attention.analysis.theory import (
    cap_share,
    cap_tail,
    far_mass_bound,
    hoeffding_tail,
    householder_gap,
    householder_kept,
    length_of_half,
    uniform_angle_gap,
)

KINDS = ("none", "householder", "two householders", "rotation", "matrices")
T, HQ, H, D, NEAR = 66, 4, 2, 4, 9
LENGTHS = (24, 66)
# Sums of some hundred float64 terms of order 1, products of at most T factors of norm 1.
CLOSE = {"rel": 1e-9, "abs": 1e-11}


def rows_of(kind: str, rows: list[dict], head: int) -> list[dict]:
    return [row for row in rows if row["kind"] == kind and row["head"] == head]


def scores(pairs: list[dict]) -> float:
    ss, bare, both = (
        sum(p[a] * p[b] for p in pairs)
        for a, b in (("score", "score"), ("bare", "bare"), ("score", "bare"))
    )
    return both / math.sqrt(ss * bare)


def queries(pairs: list[dict]) -> float:
    left = [float(p["moved"] @ p["query"] / p["query"].square().sum()) for p in pairs]
    return sum(left) / len(left)


def literal_window(found: list[list[dict]], correlation: Callable) -> int | None:
    """The bin from which on every correlation is below 0.2."""
    answer = None
    for low, high in reversed(list(pairwise(EDGES.tolist()))):
        mine = [p for pairs in found for p in pairs if low <= p["distance"] < high]
        if low == 0 and correlation is queries:
            break
        if mine and abs(correlation(mine)) >= 0.2:
            break
        answer = low if mine else answer
    return answer


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    x = make_inputs(T, HQ, H, D, request.param, gate=request.param != "none")
    probes = Probes.spread(LENGTHS, 4, T)
    rows = summary(measure(Routes.of(**x), probes, NEAR, segment=16), LENGTHS, NEAR)
    return x, probes, rows, {
        (i, h): pairs(x, i, h) for i in set(probes.positions) for h in range(HQ)
    }  # fmt: skip


def test_contexts_are_the_literal_ones(case) -> None:
    _, probes, rows, found = case
    for head in range(HQ):
        for n, row in enumerate(rows_of("context", rows, head)):
            mine = [i for i, of in zip(probes.positions, probes.of_length, strict=True) if of == n]
            each = [of_query(found[i, head], NEAR, "softmax") for i in mine]
            for name in each[0]:
                mean = sum(query[name] for query in each) / len(each)
                assert row[name] == pytest.approx(mean, **CLOSE), (head, row["length"], name)
            assert row["bound"] <= row["far_mass"]
            assert row["mixing_window"] == literal_window([found[i, head] for i in mine], scores)
            assert row["query_window"] == literal_window([found[i, head] for i in mine], queries)


def test_routes_are_the_literal_ones(case) -> None:
    _, probes, rows, found = case
    for head in range(HQ):
        for row in rows_of("route", rows, head):
            n = EDGES.tolist().index(row["length"])
            low, high = row["length"], EDGES[n + 1]
            mine = [
                (p, found[i, head][0]["moved"])
                for i in probes.positions
                for p in found[i, head]
                if low <= p["distance"] < high
            ]
            ss, bare, both = (
                sum(p[a] * p[b] for p, _ in mine)
                for a, b in (("score", "score"), ("bare", "bare"), ("score", "bare"))
            )
            assert row["score_correlation"] == pytest.approx(both / math.sqrt(ss * bare), **CLOSE)
            assert row["score_norm"] == pytest.approx(math.sqrt(ss / bare), **CLOSE)
            if row["length"]:
                kept = [
                    (float(p["moved"] @ q), float(p["moved"].norm()), float(q.norm()))
                    for p, q in mine
                ]
                square = sum(x * x / (q * q) for _, x, q in kept) / len(kept)
                assert row["kept_norm"] == pytest.approx(math.sqrt(square), **CLOSE)
                cosine = sum(xq / (x * q) for xq, x, q in kept) / len(kept)
                assert row["kept_cosine"] == pytest.approx(cosine, **CLOSE)
                product = sum(xq / (q * q) for xq, _, q in kept) / len(kept)
                assert row["kept_product"] == pytest.approx(product, **CLOSE)


def test_heads_are_the_literal_ones(case) -> None:
    x, probes, rows, found = case
    mean = matrices(x)[1:].mean(0)
    for head in range(HQ):
        (row,) = rows_of("head", rows, head)
        own = mean[head // (HQ // H)]
        assert row["spectral_norm"] == pytest.approx(float(torch.linalg.svdvals(own)[0]), **CLOSE)
        assert row["spectral_mean"] == pytest.approx(float(own.trace()) / D, **CLOSE)
        scores = {True: [], False: []}
        for i in probes.positions:
            for p in found[i, head]:
                scores[p["distance"] >= NEAR].append(p["score"])
        for far, name in ((False, "near"), (True, "far")):
            mine = torch.tensor(scores[far], dtype=torch.float64)
            assert row[f"{name}_mean"] == pytest.approx(mine.mean().item(), **CLOSE)
            deviation = mine.std(correction=0).item()
            assert row[f"{name}_deviation"] == pytest.approx(deviation, rel=1e-7)
            counts = {
                (r["above"], r["below"]): r[f"{name}_share"] for r in rows_of("scores", rows, head)
            }
            for (low, high), share in counts.items():
                inside = (mine >= (-math.inf if low is None else low)) & (
                    mine < (math.inf if high is None else high)
                )
                assert share == pytest.approx(inside.double().mean().item(), **CLOSE)
            at = torch.bucketize(torch.tensor(row[f"{name}_q50"], dtype=torch.float64), SCORES)
            middle = torch.bucketize(mine.sort().values[(len(mine) - 1) // 2], SCORES)
            assert abs(int(at) - int(middle)) <= 1
        most = max(abs(s) for group in scores.values() for s in group)
        assert row["score_most"] == pytest.approx(most, **CLOSE)
        assert row["score_most"] <= row["norm_bound"] * (1 + 1e-12)


def test_tails_count_the_keys_before_segments(case) -> None:
    x, probes, rows, found = case
    borders = sorted({*range(0, T, 16), *(i + 1 for i in probes.positions)})
    for head in range(HQ):
        counted = {False: [], True: []}
        for start in borders[:-1]:
            for i in (i for i in probes.positions if start and i >= start):
                p = found[i, head][i - start + 1]
                q, k = p["moved"], p["key"]
                scatter = q.norm() * k.norm() * D**-0.5
                if "angles" in x:
                    size = (z.unflatten(0, (2, -1)).square().sum(0) for z in (q, k))
                    scatter = math.sqrt(float(math.prod(size).sum()))  # pyright: ignore
                counted[p["distance"] >= NEAR].append(abs(float(q @ k) / float(scatter)))
        for row in rows_of("tail", rows, head):
            for far, name in ((False, "near_share"), (True, "far_share")):
                # What lies within rounding of an edge may fall to either side.
                shares = [
                    sum(u >= row["u"] + e for u in counted[far]) / len(counted[far])
                    for e in (1e-9, -1e-9)
                ]
                assert shares[0] - 1e-12 <= row[name] <= shares[1] + 1e-12


@pytest.mark.parametrize("normalizer", ["stick_breaking", "linear"])
@pytest.mark.parametrize("moves_values", [False, True])
def test_other_weights_and_moved_values(normalizer: str, moves_values: bool) -> None:
    x = make_inputs(T, HQ, H, D, "rotation", gate=normalizer == "linear")
    probes = Probes.spread((T,), 4, T)
    routes = Routes.of(**x, moves_values=moves_values, normalizer=normalizer)
    rows = summary(measure(routes, probes, NEAR, segment=16), (T,), NEAR)
    for head in range(HQ):
        (row,) = rows_of("context", rows, head)
        each = [
            of_query(pairs(x, i, head, moves_values=moves_values), NEAR, normalizer)
            for i in probes.positions
        ]
        for name in each[0]:
            mean = sum(query[name] for query in each) / len(each)
            assert row[name] == pytest.approx(mean, **CLOSE), name
        assert row["bound"] is None and row["gap"] is None


def test_sums_of_sequences_add_up() -> None:
    probes, whole = Probes.spread(LENGTHS, 4, T), Totals()
    parts = [
        measure(Routes.of(**make_inputs(T, HQ, H, D, "householder", seed=n)), probes, NEAR)
        for n in (0, 1)
    ]
    for part in parts:
        whole.merge(part)
    for name, x in whole.sums.items():
        assert torch.equal(x, parts[0].sums[name] + parts[1].sums[name])
    for name, x in whole.most.items():
        assert torch.equal(x, torch.maximum(parts[0].most[name], parts[1].most[name]))


def test_means_over_heads_of_distributions_are_distributions() -> None:
    """Heads with other scores have other bins: a bin that a head lacks has a share of 0 there."""
    x = make_inputs(T, HQ, H, D, "householder")
    x["q"] = x["q"] * torch.tensor([0.1, 1.0, 10.0, 100.0])[:, None]
    rows = summary(measure(Routes.of(**x), Probes.spread((T,), 8, T), NEAR), (T,), NEAR)
    for name in ("near_share", "far_share"):
        means = [row for row in mean_rows(rows) if row["kind"] == "scores"]
        assert sum(row[name] for row in means) == pytest.approx(1, **CLOSE)
        assert {row["head"] for row in means} == {HQ}


def test_gaps_beyond_float64s_least_weight() -> None:
    """A sink far away that leaves near keys e^−900 of the attention, and the other way round."""
    x = torch.zeros(40, 1, 2, dtype=torch.float64)
    q, k = x + 1, x.clone()
    for sink, gap in ((0, math.log(32) - 900), (39, 900 - math.log(8))):
        k[:] = 0
        k[sink, 0, 0] = 900
        measured = measure(Routes.of(q, k, k, scale=1), Probes.spread((40,), 1, 40), 8)
        (row,) = rows_of("context", summary(measured, (40,), 8), 0)
        assert row["gap"] == pytest.approx(gap, rel=1e-12)


def test_a_walk_holds_no_more_than_a_segment() -> None:
    x = make_inputs(300, HQ, H, D, "householder")
    widest = max(tile.scores.shape[2] for tile in walk(Routes.of(**x), (10, 200, 299), 32))
    assert widest == 32


def test_random_orthogonal_routes() -> None:
    n, d = 1500, 16
    x = make_inputs(n, 2, 2, d, "matrices")
    probes = Probes.spread((n,), 32, n)
    totals = measure(Routes.of(**x), probes, 64, segment=8)
    rows = summary(totals, (n,), 64)
    for head in range(2):
        # E of the mean's squared Frobenius norm is d/(n − 1); ten times that has no chance.
        (row,) = rows_of("head", rows, head)
        assert row["spectral_norm"] ** 2 < 10 * d / (n - 1)
        assert row["query_window"] == 1
        for tail in rows_of("tail", rows, head):
            count = float(totals.sums["tails"][head, 1].sum())
            share = cap_share(tail["u"], d)
            assert share <= tail["tail_bound"]
            # Neighbouring probes share most of a route, but no first step: 32 independent queries
            # at each place at least.
            assert (
                abs(tail["far_share"] - share) < 5 * math.sqrt(share * (1 - share) / 32) + 5 / count
            )


def test_householder_of_known_laws() -> None:
    d, n = 8, 8 * 60 + 1  # whole cycles of directions behind the first token
    q = torch.randn(n, 1, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.eye(d, dtype=torch.float64)[(torch.arange(n) - 1) % d][:, None]
    for beta in (0.5, 1.0, 2.0):
        x = {"w": w, "beta": q.new_full((n, 1), beta)}
        rows = summary(measure(Routes.of(q, q, q, **x), Probes.spread((n,), 8, n), 4), (n,), 4)
        (row,) = rows_of("head", rows, 0)
        assert row["spectral_norm"] == pytest.approx(householder_gap(beta, d), abs=1e-12)
        assert row["spectral_mean"] == pytest.approx(1 - beta / d, abs=1e-12)
    # Only two directions are ever turned: no gap, and tr(E H)/d says so.
    few = F.pad(w[:, :, :2], (0, d - 2)) + F.pad(w[:, :, 2:4], (0, d - 2))
    few = torch.where(
        few.norm(dim=-1, keepdim=True) > 0, few, F.pad(w.new_ones(n, 1, 1), (0, d - 1))
    )
    x = {"w": F.normalize(few, dim=-1), "beta": q.new_full((n, 1), 1.0)}
    rows = summary(measure(Routes.of(q, q, q, **x), Probes.spread((n,), 8, n), 4), (n,), 4)
    (row,) = rows_of("head", rows, 0)
    assert row["spectral_norm"] == pytest.approx(1, abs=1e-12) and row["norm_window"] is None
    assert row["spectral_mean"] == pytest.approx(1 - 1 / d, abs=1e-12)


def test_random_householders_lose_norm_and_direction_apart() -> None:
    d, n, beta = 16, 3000, 1.0
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(n, 4, d, dtype=torch.float64, generator=rng)
    w = F.normalize(torch.randn(n, 4, d, dtype=torch.float64, generator=rng), dim=-1)
    routes = Routes.of(q, q, q, w=w, beta=q.new_full((n, 4), beta))
    rows = mean_rows(summary(measure(routes, Probes.spread((n,), 128, n), 64), (n,), 64))
    for row in (r for r in rows if r["kind"] == "route" and r["length"] in (1, 2, 4, 8)):
        kept = householder_kept(beta, beta**2, d) ** row["length"]
        left = householder_gap(beta, d) ** row["length"]
        # 512 routes, each within [0, 1], deviation below 0.25: five deviations of the mean.
        assert abs(row["kept_norm"] ** 2 - kept) < 5 * 0.25 / 512**0.5
        assert abs(row["kept_product"] - left) < 5 * 0.25 / 512**0.5


def test_turns_of_known_laws() -> None:
    n, theta = 201, 0.7
    q = torch.randn(n, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signs = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    angles = theta * signs[:, None, None]
    rows = summary(
        measure(Routes.of(q, q, q, angles=angles), Probes.spread((n,), 8, n), 4), (n,), 4
    )
    (row,) = rows_of("head", rows, 0)
    assert row["spectral_norm"] == pytest.approx(math.cos(theta), abs=1e-12)
    left = {r["length"]: r["kept_product"] for r in rows_of("route", rows, 0)}
    assert left[2] == pytest.approx(1) and left[1] == pytest.approx(math.cos(theta))
    assert row["mixing_window"] is None
    a, n = 1.0, 4000
    angles = (2 * torch.rand(n, 1, 1, generator=torch.Generator().manual_seed(2)).double() - 1) * a
    q = q[:1].expand(n, 1, 2)
    rows = summary(
        measure(Routes.of(q, q, q, angles=angles), Probes.spread((n,), 8, n), 4), (n,), 4
    )
    (row,) = rows_of("head", rows, 0)
    assert abs(row["spectral_norm"] - uniform_angle_gap(a)) < 5 / n**0.5
    assert row["norm_window"] == pytest.approx(math.log(0.2) / math.log(row["spectral_norm"]))


def test_the_bounds() -> None:
    logits = torch.randn(200, 30, dtype=torch.float64) * 3
    share = logits.softmax(-1)[:, 10:].sum(-1)
    spread = logits[:, :10].amax(-1) - logits[:, 10:].amin(-1)
    bound = far_mass_bound(torch.tensor(10), torch.tensor(20), spread)
    assert (bound <= share).all()
    flat = far_mass_bound(torch.tensor(10), torch.tensor(20), torch.zeros((), dtype=torch.float64))
    assert flat.item() == pytest.approx(2 / 3)
    assert far_mass_bound(torch.tensor(1), torch.tensor(0), flat).item() == 0
    for spread in (0.0, 3.0, 40.0):
        at = length_of_half(100, spread)
        half = far_mass_bound(
            torch.tensor(100), torch.tensor(at - 100), torch.tensor(spread).double()
        )
        assert half.item() == pytest.approx(0.5)
    assert length_of_half(1, 1e4) == math.inf
    for d in (2, 3, 16):
        shares = [cap_share(u / 4, d) for u in range(17)]
        assert all(s <= cap_tail(u / 4) for u, s in enumerate(shares))
    assert cap_share(1.0, 2) == pytest.approx(2 * math.acos(1 / math.sqrt(2)) / math.pi, rel=1e-6)
    phases = 2 * math.pi * torch.rand(20000, 8, generator=torch.Generator().manual_seed(0))
    u = (phases.cos().sum(-1) / 8**0.5).abs()
    for at in (1.0, 2.0):
        assert (u >= at).double().mean().item() < hoeffding_tail(at)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"angles": torch.zeros(8, 2, 3)}, "angles: expected shape"),
        (
            {"angles": torch.zeros(8, 2, 2), "matrices": torch.zeros(8, 2, 4, 4)},
            "matrices: expected one",
        ),
        ({"moves_values": True}, "moves_values: expected False"),
        ({"normalizer": "sparse"}, "normalizer: expected one of"),
        ({"w": torch.zeros(8, 2, 4)}, "beta: expected together with w"),
    ],
)
def test_bad_tensors_are_refused(change: dict, message: str) -> None:
    x = torch.zeros(8, 2, 4)
    with pytest.raises(ValueError, match=message):
        Routes.of(x, x, x, **change)


def test_bad_options_are_refused() -> None:
    x = torch.randn(40, 1, 2)
    routes = Routes.of(x, x, x)
    with pytest.raises(ValueError, match="near: expected at least 1"):
        measure(routes, Probes.spread((40,), 2, 40), 0)
    with pytest.raises(ValueError, match="probes: expected positions below 40"):
        measure(routes, Probes.spread((41,), 2, 41), 4)
    with pytest.raises(ValueError, match="lengths: expected at most the 40 tokens"):
        Probes.spread((64,), 2, 40)
    with pytest.raises(ValueError, match="lengths: expected rising"):
        Probes.spread((32, 16), 2, 40)
    with pytest.raises(ValueError, match="level: expected"):
        summary(measure(routes, Probes.spread((40,), 2, 40), 4), (40,), 4, level=1.5)
