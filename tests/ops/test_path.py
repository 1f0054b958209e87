"""path_attention: what it refuses and what it returns."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from operator_cases import make_inputs

from path_attention import Packing, explain_choice, path_attention
from path_attention.ops import path
from path_attention.ops.triton import device

T = 6
GOOD = make_inputs(T, heads=(4, 2), size=(8, 5), dtype=torch.float32)._asdict()


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


REFUSED = {
    "w alone": ({"beta": None}, "beta: expected together with w, got None"),
    "beta alone": ({"w": None}, "w: expected together with beta, got None"),
    "q's rank": ({"q": x(1, T, 8)}, "q: expected [B, T, heads, head size], got [1, 6, 8]"),
    "k's rank": ({"k": x(T, 2, 8)}, "k: expected [B, T, heads, head size], got [6, 2, 8]"),
    "v's rank": ({"v": x(5)}, "v: expected [B, T, heads, head size], got [5]"),
    "heads": ({"q": x(1, T, 3, 8)}, "q: expected a multiple of k's 2 heads, got 3 heads"),
    "no q heads": ({"q": x(1, T, 0, 8)}, "q: expected a multiple of k's 2 heads, got 0 heads"),
    "no k heads": ({"k": x(1, T, 0, 8)}, "q: expected a multiple of k's 0 heads, got 4 heads"),
    "no key size": ({"q": x(1, T, 4, 0)}, "q: expected a head size of at least 1, got 0"),
    "no value size": ({"v": x(1, T, 2, 0)}, "v: expected a head size of at least 1, got 0"),
    "k's length": ({"k": x(1, 5, 2, 8)}, "k: expected shape [1, 6, 2, 8], got [1, 5, 2, 8]"),
    "k's batch": ({"k": x(2, T, 2, 8)}, "k: expected shape [1, 6, 2, 8], got [2, 6, 2, 8]"),
    "v's heads": ({"v": x(1, T, 4, 5)}, "v: expected shape [1, 6, 2, 5], got [1, 6, 4, 5]"),
    "w's heads": ({"w": x(1, T, 4, 8)}, "w: expected shape [1, 6, 2, 8], got [1, 6, 4, 8]"),
    "w's rank": ({"w": x(1, T, 8)}, "w: expected shape [1, 6, 2, 8], got [1, 6, 8]"),
    "beta's heads": ({"beta": x(1, T, 4)}, "beta: expected shape [1, 6, 2], got [1, 6, 4]"),
    "gate's heads": (
        {"log_forget": x(1, T, 2)},
        "log_forget: expected shape [1, 6, 4], got [1, 6, 2]",
    ),
    "integers": ({"q": x(1, T, 4, 8, dtype=torch.int64)}, "q: expected a dtype of"),
    "k's dtype": (
        {"k": x(1, T, 2, 8, dtype=torch.float64)},
        "k: expected dtype torch.float32, got torch.float64",
    ),
    "w's dtype": (
        {"w": x(1, T, 2, 8, dtype=torch.bfloat16)},
        "w: expected dtype torch.float32, got torch.bfloat16",
    ),
    "gate's dtype": (
        {"log_forget": x(1, T, 4, dtype=torch.float16)},
        "log_forget: expected dtype torch.float32, got torch.float16",
    ),
    "device": (
        {"v": x(1, T, 2, 5, device="meta")},
        "v: expected on q's device cpu, got meta",
    ),
    "borders' device": (
        {"cu_seqlens": Packing(x(2, dtype=torch.int32, device="meta"), (T,))},
        "cu_seqlens: expected on q's device cpu, got meta",
    ),
    "borders' start": (
        {"cu_seqlens": torch.tensor([1, T])},
        "cu_seqlens: expected to start at 0, got 1",
    ),
    "borders' order": (
        {"cu_seqlens": torch.tensor([0, 4, 2, T])},
        "cu_seqlens: expected borders that never decrease, got 4 then 2 at index 2",
    ),
    "borders' end": (
        {"cu_seqlens": torch.tensor([0, 4])},
        "cu_seqlens: expected to end at T = 6, the number of tokens, got 4",
    ),
    "a packing's end": (
        {"cu_seqlens": Packing.from_lengths([3, 4])},
        "cu_seqlens: expected to end at T = 6, the number of tokens, got 7",
    ),
    "no tensor": (
        {"cu_seqlens": [0, T]},
        "cu_seqlens: expected a tensor or a Packing, got list",
    ),
    "implementation": (
        {"implementation": "fast"},
        "implementation: expected one of ['blockwise', 'definition', 'sdpa', 'triton'] or None, "
        "got 'fast'",
    ),
    "sdpa with w": (
        {"implementation": "sdpa", "log_forget": None},
        "w: expected None with implementation 'sdpa', got a tensor",
    ),
    "sdpa with a gate": (
        {"implementation": "sdpa", "w": None, "beta": None},
        "log_forget: expected None with implementation 'sdpa', got a tensor",
    ),
    "no factors": (
        {"w": x(1, T, 2, 0, 8), "beta": x(1, T, 2, 0)},
        "w: expected at least 1 factor a token, got 0",
    ),
    "factors without a size in beta": (
        {"w": x(1, T, 2, 3, 8)},
        "beta: expected shape [1, 6, 2, 3], got [1, 6, 2]",
    ),
    "factors of beta alone": (
        {"beta": x(1, T, 2, 3)},
        "beta: expected shape [1, 6, 2], got [1, 6, 2, 3]",
    ),
    "two factors with triton": (
        {"w": x(1, T, 2, 2, 8), "beta": x(1, T, 2, 2), "implementation": "triton"},
        "implementation: expected one Householder factor a token, got 2 with 'triton'",
    ),
    "beta of 2.5": (
        {"beta": x(1, T, 2) + 2.5, "check_contract": True},
        "beta: expected values in [0, 2], got values in [2.5, 2.5]",
    ),
    "beta of -1": (
        {"beta": x(1, T, 2) - 1, "check_contract": True},
        "beta: expected values in [0, 2], got values in [-1, -1]",
    ),
    "beta of nan": (
        {"beta": x(1, T, 2) + torch.nan, "check_contract": True},
        "beta: expected values in [0, 2], got values in [nan, nan]",
    ),
    "long w": (
        {"w": 1.01 * GOOD["w"], "check_contract": True},
        "w: expected unit norm, got a vector with ‖w‖² = 1.02",
    ),
    "w of nan": (
        {"w": torch.nan * GOOD["w"], "check_contract": True},
        "w: expected unit norm, got a vector with ‖w‖² = nan",
    ),
    "positive gate": (
        {"log_forget": x(1, T, 4) + 0.5, "check_contract": True},
        "log_forget: expected values of at most 0, got 0.5",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changed, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        path_attention(**{**GOOD, **changed})


def test_a_batch_with_borders_is_refused():
    inputs = make_inputs(T, B=2)
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1 .* got B = 2"):
        path_attention(*inputs, cu_seqlens=torch.tensor([0, 2 * T]))


def test_what_keeps_the_contract_passes_its_check():
    inputs = make_inputs(50, dtype=torch.float32)
    expected = path_attention(*inputs)
    assert torch.equal(path_attention(*inputs, check_contract=True), expected)
    path_attention(*inputs.to(torch.bfloat16), check_contract=True)  # a rounded w is renormalised
    path_attention(*make_inputs(0), check_contract=True)


@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_the_results(dtype, implementation):
    inputs = make_inputs(9, dtype=dtype)
    out, lse = path_attention(*inputs, return_lse=True, implementation=implementation)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    alone = path_attention(*inputs, implementation=implementation)
    assert torch.equal(alone, out)


def test_the_default_scale():
    inputs = make_inputs(20, size=(16, 4))
    assert torch.equal(path_attention(*inputs), path_attention(*inputs, scale=0.25))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_direction_is_renormalised(dtype):
    inputs = make_inputs(80, dtype=dtype)
    assert inputs.w is not None
    exact = torch.nn.functional.normalize(inputs.w.float(), dim=-1)
    out = path_attention(*inputs)
    assert torch.equal(out, path_attention(*inputs._replace(w=exact)))
    assert (inputs.w.float().square().sum(-1) - 1).abs().max() > 1e-4  # so that it matters


# --- Which implementation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": torch.float64}, "expected bfloat16, float16 or float32, got torch.float64"),
        ({}, "expected an NVIDIA GPU, got tensors on cpu"),
    ],
)
def test_triton_is_refused_where_it_cannot_run(changed, message, monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = make_inputs(T, **{"dtype": torch.float32, **changed})
    with pytest.raises(ValueError, match=f"implementation: {message} with 'triton'"):
        path_attention(*inputs, implementation="triton")


@pytest.mark.parametrize(
    ("size", "dtype", "message"),
    [
        ((129, 8), torch.float32, "at most 128, got D = 129 and DV = 8"),
        ((8, 300), torch.bfloat16, "at most 256, got D = 8 and DV = 300"),
    ],
)
def test_triton_is_refused_for_large_heads(size, dtype, message, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    inputs = make_inputs(T, size=size, dtype=dtype)
    with pytest.raises(ValueError, match=f"implementation: expected head sizes of {message}"):
        path_attention(*inputs, implementation="triton")


def test_triton_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="implementation: expected the package triton, which is"):
        path_attention(*make_inputs(T, dtype=torch.float32), implementation="triton")


def tensor_on(device: str, dtype: torch.dtype = torch.bfloat16, size: int = 64):
    """As much of a tensor as the choice looks at, so that no GPU is needed."""
    shape, itemsize = (1, T, 1, size), dtype.itemsize
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=shape, itemsize=itemsize)


def choose(implementation: str | None = None, *, q=None, w=None, gate=None, **options) -> str:
    q = tensor_on("cpu") if q is None else q
    defaults = {"packing": None, "return_lse": False, "lse_gradient": False}
    return path._choose(implementation, q, q, q, w, gate, **{**defaults, **options})


@pytest.mark.parametrize(
    ("q", "capability", "moved", "plain"),
    [
        (tensor_on("cuda:0"), (8, 0), "triton", "sdpa"),
        (tensor_on("cuda:0", size=256), (9, 0), "triton", "sdpa"),
        (tensor_on("cuda:0", size=256), (8, 0), "blockwise", "sdpa"),
        (tensor_on("cuda:0", torch.float32, 128), (10, 0), "triton", "sdpa"),
        (tensor_on("cuda:0"), (7, 5), "blockwise", "sdpa"),
        (tensor_on("cuda:0", torch.float64), (9, 0), "blockwise", "blockwise"),
        (tensor_on("cuda:0", torch.float32, 129), (9, 0), "blockwise", "sdpa"),
        (tensor_on("cuda:0", torch.float32, 65), (8, 0), "blockwise", "sdpa"),
        (tensor_on("cuda:0", size=257), (9, 0), "blockwise", "blockwise"),
        (tensor_on("cpu"), (9, 0), "blockwise", "sdpa"),
        (tensor_on("cpu", torch.float64), (9, 0), "blockwise", "sdpa"),
    ],
)
def test_the_choice(q, capability, moved, plain, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    packed = plain == "sdpa" and (q.device.type == "cpu" or q.itemsize == 2) and capability[0] >= 8
    memory = {8: 163, 9: 227, 10: 227, 7: 64}[capability[0]] * 1024
    monkeypatch.setattr(device, "shared_memory", lambda index: memory)
    for _ in range(2):
        assert choose(q=q, w=x(1, T, 1, 64)) == moved
        assert choose(q=q, gate=x(1)) == moved
        assert choose(q=q) == choose(q=q, return_lse=True) == plain
        assert choose(q=q, return_lse=True, lse_gradient=True) == moved
        assert choose(q=q, packing=Packing.from_lengths([64])) == ("sdpa" if packed else moved)
        assert choose(q=q, w=x(1, T, 1, 2, 64)) == "blockwise"  # two factors a token
        monkeypatch.setattr(device, "find_spec", lambda name: None)
        moved = "blockwise"


def test_return_lse_alone_does_not_change_the_choice_for_other_devices():
    assert choose(q=tensor_on("mps")) == "sdpa"
    assert choose(q=tensor_on("mps"), return_lse=True) == "blockwise"
    with pytest.raises(ValueError, match="expected cpu or cuda tensors for return_lse, got .* mps"):
        choose("sdpa", q=tensor_on("mps"), return_lse=True)


def test_a_choice_is_explained(monkeypatch):
    pytest.importorskip("triton")
    from path_attention.ops.triton import call

    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def make(size: int):
        x = make_inputs(T, size=(size, size), dtype=torch.float32)
        return (*(y.bfloat16() for y in x[:3]), *x[3:])

    q, k, v, w, beta, gate = make(64)
    asked = {"implementation": "triton"}
    portable = "triton: forward portable, dq portable, dk/dv portable"
    assert explain_choice(q, k, v, w, beta, **asked) == portable
    monkeypatch.setattr(call, "warpgroups_of", lambda device: True)
    mixed = "triton: forward portable, dq portable, dk/dv hopper"
    assert explain_choice(q, k, v, w, beta, gate, **asked) == mixed
    wide = make(128)
    hopper = "triton: forward hopper, dq hopper, dk/dv hopper"
    assert explain_choice(*wide, **asked) == hopper
    single = (*(x.float() for x in wide[:3]), *wide[3:])
    assert explain_choice(*single, **asked) == portable
    assert explain_choice(q, k, v) == "sdpa"
    double = [None if x is None else x.double() for x in (q, k, v, w, beta)]
    wants = "blockwise: triton wants bfloat16, float16 or float32, got torch.float64"
    assert explain_choice(*double) == wants
    assert explain_choice(*double, implementation="blockwise") == "blockwise"
    with pytest.raises(ValueError, match="w: expected None with implementation 'sdpa'"):
        explain_choice(*double, implementation="sdpa")
