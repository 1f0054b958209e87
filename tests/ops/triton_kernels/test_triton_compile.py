"""Kernels compile for devices that are not here, within their shared memory and few spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KIB = 1024
# Shared memory a program may have, by compute capability: A100, H100, B200; RTX 3090, 4090, 5090.
SHARED_MEMORY = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
SHARED_MEMORY |= dict.fromkeys((86, 89, 120), 99 * KIB)
# Bytes of stack (what registers spill to) allowed a thread; 0 where none are named.
STACK = {
    (80, 64): {
        "block_fwd_kernel": 1600,
        "pair_fwd_kernel": 2600,
        "meet_fwd_kernel": 160,
        "queries_bwd_kernel": 240,
        "keys_bwd_kernel": 1000,
        "pair_bwd_kernel": 140,
        "pair_local_bwd_kernel": 32,
        "local_bwd_kernel": 48,
        "block_bwd_kernel": 2600,
    },
    (80, 128): {
        "block_fwd_kernel": 100,
        "pair_fwd_kernel": 960,
        "keys_fwd_kernel": 64,
        "queries_fwd_kernel": 120,
        "meet_fwd_kernel": 860,
        "queries_bwd_kernel": 2700,
        "keys_bwd_kernel": 2100,
        "local_bwd_kernel": 500,
        "block_bwd_kernel": 1800,
    },
    (90, 64): {
        "block_fwd_kernel": 380,
        "pair_fwd_kernel": 440,
        "queries_fwd_kernel": 96,
        "keys_bwd_kernel": 220,
        "pair_bwd_kernel": 480,
        "local_bwd_kernel": 96,
        "block_bwd_kernel": 640,
    },
    (100, 64): {
        "block_fwd_kernel": 300,
        "pair_fwd_kernel": 64,
        "keys_bwd_kernel": 80,
        "pair_bwd_kernel": 380,
    },
    (90, 128): {
        "block_fwd_kernel": 120,
        "queries_fwd_kernel": 96,
        "keys_bwd_kernel": 260,
        "pair_bwd_kernel": 380,
        "pair_local_bwd_kernel": 260,
        "local_bwd_kernel": 440,
        "block_bwd_kernel": 420,
    },
}
ALWAYS = {"delta_bwd_kernel", "forward_ranges_kernel", "backward_ranges_kernel"}
ALWAYS |= {"queries_fwd_kernel", "meet_fwd_kernel", "queries_bwd_kernel", "keys_bwd_kernel"}
TRANSPORT = {"block_fwd_kernel", "pair_fwd_kernel", "tree_fwd_kernel", "keys_fwd_kernel"}
TRANSPORT |= {
    "transitions_bwd_kernel",
    "tree_bwd_kernel",
    "pair_bwd_kernel",
    "pair_local_bwd_kernel",
    "block_bwd_kernel",
}
GATE = {"decay_fwd_kernel", "gates_fwd_kernel", "decay_bwd_kernel"}


def kernels(capability: int, D: int, encoding: str, dtype: str = "bfloat16") -> list[dict]:
    """What each kernel takes, compiled in a process that does not interpret."""
    spec = f"{capability}:{D}:{encoding}:{dtype}:{SHARED_MEMORY[capability]}"
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE.parent)])
    command = [sys.executable, str(HERE / "compile_kernels.py"), spec]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(capability: int, D: int, encoding: str, dtype: str = "bfloat16") -> None:
    rows = kernels(capability, D, encoding, dtype)
    names = {row["kernel"] for row in rows}
    assert names >= ALWAYS
    assert (names >= TRANSPORT) == encoding.startswith("path")
    assert ("local_bwd_kernel" in names) != encoding.startswith("path")
    assert (names >= GATE) == encoding.endswith("fox")
    wrong = []
    for row in rows:
        limit = STACK.get((capability, D), {}).get(row["kernel"], 0)
        if "error" in row:
            wrong.append(f"{row['kernel']}: {row['error']}")
            continue
        if row["shared"] > SHARED_MEMORY[capability]:
            wrong.append(f"{row['kernel']}: {row['shared']} bytes of shared memory")
        if dtype == "bfloat16" and (capability, D) in STACK and row["stack"] > limit:
            wrong.append(f"{row['kernel']}: {row['stack']} bytes of stack, allowed {limit}")
    assert not wrong, "\n".join(wrong)


CAPABILITIES = [80, 90, 100]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability):
    check(capability, 64, "path_fox")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["fox", "nope"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_other_encodings(capability, encoding):
    check(capability, 64, encoding)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_heads_of_128(capability):
    check(capability, 128, "path_fox")


@pytest.mark.slow
def test_heads_of_256():
    check(90, 256, "path")


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "D"), [(90, 128), (86, 64)])
def test_float32(capability, D):
    check(capability, D, "path_fox", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("capability", [86, 89, 120])
def test_devices_with_little_shared_memory(capability, D):
    check(capability, D, "path_fox")


# --- Hopper's main loops --------------------------------------------------------------------------

HOPPER = {"meet_fwd_kernel", "queries_bwd_kernel", "keys_bwd_kernel"}


@pytest.mark.parametrize(
    ("D", "encoding"),
    [
        (128, "path_fox"),
        pytest.param(128, "path", marks=pytest.mark.slow),
        pytest.param(64, "path_fox", marks=pytest.mark.slow),
        pytest.param(128, "fox", marks=pytest.mark.slow),
    ],
)
def test_hopper(D, encoding):
    rows = {row["kernel"]: row for row in kernels(90, D, f"hopper_{encoding}")}
    replaced = HOPPER if D == 128 else {"keys_bwd_kernel"}
    assert HOPPER & set(rows) == HOPPER - replaced
    # Of the keys' kernel what lives from level to level spills, nothing inside a level's loop.
    stack = {"queries_bwd_hopper_kernel": 24, "keys_bwd_hopper_kernel": 320}
    for name in replaced:
        row = rows[name.replace("_kernel", "_hopper_kernel")]
        assert "error" not in row, row
        assert row["shared"] <= SHARED_MEMORY[90]
        assert row["stack"] <= stack.get(row["kernel"], 0), row


# --- Stick-breaking attention --------------------------------------------------------------------

STICK = {"stick_fwd_kernel", "stick_queries_bwd_kernel", "stick_keys_bwd_kernel"}


def check_stick(capability: int, D: int, dtype: str, stack: int, encoding: str = "stick") -> None:
    rows = kernels(capability, D, encoding, dtype)
    assert {row["kernel"] for row in rows} == STICK
    for row in rows:
        assert "error" not in row, row
        assert row["shared"] <= SHARED_MEMORY[capability], row
        assert row["stack"] <= stack, row


@pytest.mark.parametrize(("capability", "stack"), [(80, 2200), (90, 360), (100, 200)])
def test_stick_breaking(capability, stack):
    check_stick(capability, 64, "bfloat16", stack)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "D", "dtype", "stack"),
    [
        (80, 128, "bfloat16", 3600),
        (90, 128, "bfloat16", 1300),
        (100, 128, "bfloat16", 420),
        (86, 128, "bfloat16", 3600),
        (90, 64, "float16", 360),
        (90, 64, "float32", 4000),
    ],
)
def test_stick_breaking_of_other_sizes(capability, D, dtype, stack):
    check_stick(capability, D, dtype, stack)


@pytest.mark.parametrize(
    ("capability", "D", "dtype", "stack"),
    [
        (90, 64, "bfloat16", 120),
        pytest.param(80, 64, "bfloat16", 2200, marks=pytest.mark.slow),
        pytest.param(90, 128, "bfloat16", 420, marks=pytest.mark.slow),
        pytest.param(100, 128, "bfloat16", 420, marks=pytest.mark.slow),
        pytest.param(90, 64, "float16", 360, marks=pytest.mark.slow),
        pytest.param(90, 64, "float32", 3600, marks=pytest.mark.slow),
    ],
)
def test_stick_breaking_over_other_keys(capability, D, dtype, stack):
    """Without the diagonal tile less spills."""
    check_stick(capability, D, dtype, stack, "stick_rectangle")


# --- Decoding ------------------------------------------------------------------------------------

DECODE = {"attend_kernel", "tail_kernel", "finish_kernel"}


def check_decode(capability: int, D: int, encoding: str, dtype: str, stack: int) -> None:
    rows = kernels(capability, D, f"decode_{encoding}", dtype)
    more = {"move_kernel"} if "path" in encoding else set()
    assert {row["kernel"] for row in rows} == DECODE | more
    for row in rows:
        assert "error" not in row, row
        assert row["shared"] <= SHARED_MEMORY[capability], row
        assert row["stack"] <= stack, row


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_decode(capability):
    check_decode(capability, 64, "path_fox", "bfloat16", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "D", "encoding", "dtype", "stack"),
    [
        (80, 128, "path_fox", "bfloat16", 240),
        (90, 128, "path_fox", "bfloat16", 0),
        (100, 128, "path_fox", "bfloat16", 0),
        (90, 256, "path", "bfloat16", 920),
        (90, 64, "nope", "bfloat16", 0),
        (90, 64, "fox", "float16", 0),
        (90, 64, "path_fox", "float32", 32),
        (86, 128, "path", "bfloat16", 296),
    ],
)
def test_decode_of_other_sizes(capability, D, encoding, dtype, stack):
    check_decode(capability, D, encoding, dtype, stack)


PREFILL = {"units_kernel", "merge_kernel", "record_kernel"}


def check_prefill(capability: int, D: int, encoding: str, dtype: str, stack: int) -> None:
    rows = kernels(capability, D, f"prefill_{encoding}", dtype)
    more = {"solve_kernel", "walk_kernel"} if "path" in encoding else set()
    assert {row["kernel"] for row in rows} == PREFILL | more
    for row in rows:
        assert "error" not in row, row
        assert row["shared"] <= SHARED_MEMORY[capability], row
        assert row["stack"] <= stack, row


def test_prefill():
    check_prefill(90, 64, "path_fox", "bfloat16", 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "D", "encoding", "dtype", "stack"),
    [
        (80, 128, "path_fox", "bfloat16", 920),
        (90, 128, "path_fox", "bfloat16", 420),
        (90, 256, "path", "bfloat16", 1500),
        (86, 128, "path", "bfloat16", 1120),
    ],
)
def test_prefill_of_other_sizes(capability, D, encoding, dtype, stack):
    check_prefill(capability, D, encoding, dtype, stack)
