"""docs/how-to-use-the-operator.md: its code runs and means what it says; its tables are true."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from path_attention.ops import directions, path, stick_breaking
from path_attention.ops.path import path_attention
from path_attention.ops.triton import device

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-to-use-the-operator.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)
# Of the largest result: scores of at most 8 or so err by a few of their own roundings.
ALLOWED = 64 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What the code defines; it makes `w` anew: `first_w` is the one before."""
    defined: dict[str, Any] = {"__name__": "how_to"}
    with pytest.MonkeyPatch.context() as patch:
        compile_quickly = functools.partial(torch.compile, backend="aot_eager")
        patch.setattr(torch, "compile", compile_quickly)
        torch.manual_seed(0)
        for block in CODE:
            exec(block, defined)
            defined.setdefault("first_w", defined["w"])
        yield defined
    torch.compiler.reset()


def scores(x: dict[str, Any], log_forget: torch.Tensor) -> torch.Tensor:
    """scale · q·k plus the gates between, −∞ above the diagonal: `[B, HQ, T, T]`, float64."""
    T, group = x["T"], x["HQ"] // x["H"]
    k = x["k"].double().repeat_interleave(group, 2)
    plain = torch.einsum("bihd,bjhd->bhij", x["q"].double(), k) * x["D"] ** -0.5
    sums = log_forget.double().cumsum(1).transpose(1, 2)
    future = torch.ones(T, T).triu(1).bool()
    return (plain + sums[..., None] - sums[..., None, :]).masked_fill(future, -torch.inf)


def test_its_results_are_what_it_says(names) -> None:
    exact = names["exact"]
    allowed = ALLOWED * exact.abs().max().item()
    torch.testing.assert_close(names["close"].double(), exact, rtol=0, atol=allowed)
    inputs = [names[x] for x in ("q", "k", "v", "first_w", "beta")]
    gradients = torch.autograd.grad(path_attention(*names["leaves"]).sum(), names["leaves"])
    assert all(torch.equal(x.grad, g) for x, g in zip(names["leaves"], gradients, strict=True))
    apart = [path_attention(*(x[:1, a:b] for x in inputs)) for a, b in ((0, 100), (100, 256))]
    for packed in (names["packed"], names["compiled"]):
        torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=0, atol=allowed)
    assert names["positions"].tolist() == [*range(100), *range(156)]
    assert names["refused"] == "w: expected unit norm, got a vector with ‖w‖² = 1.21"
    assert names["turned"].shape == names["fading"].shape == exact.shape
    whole, _ = names["linear_attention"](*inputs[:3], names["w"], names["beta"])
    parts = torch.cat([names["first"], names["second"]], 1)
    torch.testing.assert_close(parts, whole, rtol=0, atol=ALLOWED * whole.abs().max().item())
    norms = names["w"].norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=ALLOWED)
    rest = names["log_remaining"]
    assert rest.shape == exact.shape[:3] and (rest <= 0).all() and not names["out"][:, 0].any()


def test_alibi_and_the_sink_are_their_formulas(names) -> None:
    gates = -names["slopes"].expand(names["B"], names["T"], names["HQ"])
    v = names["v"].double().repeat_interleave(names["HQ"] // names["H"], 2)
    wanted = torch.einsum("bhij,bjhe->bihe", scores(names, gates).softmax(-1), v)
    allowed = ALLOWED * wanted.abs().max().item()
    torch.testing.assert_close(names["alibi"].double(), wanted, rtol=0, atol=allowed)
    inputs = [names[x].double() for x in ("q", "k", "v", "first_w", "beta")]
    out, lse = path_attention(*inputs, return_lse=True, implementation="definition")
    wanted = out * (lse.exp() / (lse.exp() + 1))[..., None]  # e⁰ more in each denominator
    torch.testing.assert_close(names["with_sink"].double(), wanted, rtol=0, atol=allowed)


def test_infinity_hides_what_came_before(names) -> None:
    gates = torch.zeros(names["B"], names["T"], names["HQ"])
    gates[:, 100] = -torch.inf
    inputs = [names[x] for x in ("q", "k", "v", "first_w", "beta")]
    got = path_attention(*inputs, gates)[:, 100:]
    alone = path_attention(*(x[:, 100:] for x in inputs))
    torch.testing.assert_close(got, alone, rtol=0, atol=ALLOWED * alone.abs().max().item())


def test_it_names_every_argument_and_implementation() -> None:
    rows = re.findall(r"^\| `\"?(\w+)\"?` \|", TEXT, flags=re.M)
    arguments = list(inspect.signature(path_attention).parameters)
    assert set(rows) == {*arguments, *path.IMPLEMENTATIONS, "sdpa"}


@pytest.mark.parametrize("index", [0, 1], ids=["large", "small"])
def test_its_head_sizes_are_the_kernels(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = re.findall(r"^\| (?:\d+ KiB or more|less) \| .* \| (\d+) \| (\d+) \|", TEXT, flags=re.M)
    memory = [int(re.findall(r"^\| (\d+) KiB or more", TEXT, flags=re.M)[0]) * 1024, 163 * 1024]
    assert memory[0] == device.LARGE_SHARED_MEMORY and len(rows) == 2
    monkeypatch.setattr(device, "shared_memory", lambda _: memory[index])
    sizes = [device.largest_head_size("cuda", 0, x) for x in (torch.bfloat16, torch.float32)]
    assert sizes == [int(size) for size in rows[index]]


def test_its_siblings_limits_are_theirs() -> None:
    most = stick_breaking._TRITON_HEAD_SIZE
    assert f"Triton takes D and DV up to {most}, {most // 2} in float32" in TEXT
    limits = directions._TRITON_HEAD_SIZE, directions._TRITON_WIDTH
    assert "(D to {}, K to {}, not float64)".format(*limits) in TEXT
