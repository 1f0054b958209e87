"""No kernel leaves two accesses of an address to chance (`program_order.py`)."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import encoded
from operator_cases import run
from stick_cases import make_inputs
from stick_cases import run as run_stick

from path_attention.ops.decode import DecodeState, KeyGroup, Past
from path_attention.ops.directions import householder_directions
from path_attention.ops.packing import Packing
from path_attention.ops.stick_rectangle import StickRectangle

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def found():
    from program_order import races

    with races() as found:
        yield found


# --- What is found --------------------------------------------------------------------------------


@triton.jit
def _order_kernel(x_ptr, KIND: tl.constexpr, BARRIER: tl.constexpr):
    o = tl.arange(0, 16)
    turned = x_ptr + 15 - o
    if KIND == "read after write":
        tl.store(x_ptr + o, o)
        if BARRIER:
            tl.debug_barrier()
        tl.store(x_ptr + 16 + o, tl.load(turned))
    elif KIND == "write after read":
        b_x = tl.load(turned)
        if BARRIER:
            tl.debug_barrier()
        tl.store(x_ptr + o, b_x)
    elif KIND == "write after write":
        tl.store(turned, o)
        if BARRIER:
            tl.debug_barrier()
        tl.store(x_ptr + o, o)
    elif KIND == "sum":  # by the same pointers, but not of one element
        b_x = tl.load(x_ptr + o)
        if BARRIER:
            tl.debug_barrier()
        tl.store(x_ptr + o, tl.zeros_like(o) + tl.sum(b_x, 0))
    elif KIND == "shifted":  # elements that wait for others than they overwrite
        b_x = tl.load(x_ptr + o)
        if BARRIER:
            tl.debug_barrier()
        tl.store(x_ptr + 1 + o, b_x)
    elif KIND == "two reads":  # one read is waited for, one is not
        b_x, b_other = tl.load(x_ptr + o), tl.load(turned)
        if BARRIER:
            tl.debug_barrier()
        tl.store(x_ptr + o, b_x + 1)
        tl.store(x_ptr + 16 + o, b_other)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["read after write", "write after read", "write after write", "sum", "shifted", "two reads"],
)
def test_a_missing_barrier_is_found(kind, barrier, found):
    _order_kernel[(1,)](torch.zeros(32, dtype=torch.int32), KIND=kind, BARRIER=barrier)
    assert len(found) == 1 - barrier
    if found and " after " in kind:
        assert next(iter(found)).kind == kind


@triton.jit
def _sum_kernel(x_ptr, y_ptr, n):
    o_r, o_c = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    p_x = x_ptr + o_r * 16 + o_c
    b_y = tl.load(y_ptr + o_r * 16 + o_c)
    b_x = tl.load(p_x, o_r < n, other=0.0)
    b_x = tl.where(o_r < o_c, b_x, -2 * b_x).to(tl.float16).to(tl.float32)
    tl.store(p_x, tl.dot(b_y, b_y, b_x))


def test_an_element_waits_for_what_it_is_made_of(found):
    _sum_kernel[(1,)](torch.zeros(16, 16), torch.ones(16, 16), 9)
    assert not found


@triton.jit
def _copied_kernel(x_ptr, x_desc):
    o = tl.arange(0, 16)
    tl.store(x_ptr + o, o)
    tl.debug_barrier()
    tl.store(x_ptr + 16 + o, x_desc.load([0]))


def test_a_bulk_copy_does_not_see_a_store_behind_a_barrier(found):
    x = torch.zeros(32, dtype=torch.int32)
    _copied_kernel[(1,)](x, TensorDescriptor(x, [32], [1], [16]))
    assert [race.kind for race in found] == ["read after write"]


@triton.jit
def _programs_kernel(x_ptr, KIND: tl.constexpr):
    i, o = tl.program_id(0), tl.arange(0, 16)
    if KIND == "apart":
        tl.store(x_ptr + 16 * i + o, o)
    elif KIND == "two programs write":
        tl.store(x_ptr + 15 * i + o, o)
    elif KIND == "atomic":
        tl.atomic_max(x_ptr, i, sem="relaxed")
    elif i == 3:
        tl.store(x_ptr + 16 * i + o, tl.load(x_ptr + 15 + o))
    else:
        tl.store(x_ptr + 16 * i + o, o, o < 15)


@pytest.mark.parametrize(
    "kind", ["apart", "two programs write", "atomic", "a program writes, another reads"]
)
def test_programs_that_meet_are_found(kind, found):
    _programs_kernel[(4,)](torch.zeros(64, dtype=torch.int32), KIND=kind)
    assert {race.kind for race in found} == ({kind} if " " in kind else set())


# --- The kernels ----------------------------------------------------------------------------------


def run_operator(encoding: str, heads: tuple[int, int], lengths: list[int], **options) -> None:
    borders = torch.tensor([0, *lengths]).cumsum(0)
    run(encoded(encoding, sum(lengths), heads=heads, **options), "triton", cu_seqlens=borders)


# No level but the first (a pair, a lone block, an empty document), then several.
@pytest.mark.parametrize(
    ("encoding", "heads", "lengths"),
    [
        ("path", (2, 1), [65]),
        ("path_fox", (1, 1), [128, 64, 0]),
        ("path_fox", (1, 1), [330]),
        ("path_fox", (2, 1), [200]),
        ("fox", (2, 1), [130, 70]),
        ("nope", (1, 1), [200]),
    ],
    ids=str,
)
def test_the_operator(encoding, heads, lengths, found):
    run_operator(encoding, heads, lengths)
    assert not found


@pytest.mark.parametrize("heads", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_a_block_s_backward_in_one_launch_and_in_two(size, heads, found):
    from path_attention.ops.triton import call

    inputs = encoded("path_fox", 130, heads=heads, size=(size, size), dtype=torch.float16)
    assert call.chosen_tiles(*inputs[:1], *inputs[2:4], inputs[5]).block_at_once == (size == 64)
    run(inputs, "triton")
    assert not found


def test_every_barrier_of_the_operator_is_needed():
    from program_order import races

    with races(barriers=False) as found:
        run_operator("path_fox", (1, 1), [330])
    places = {(race.kind, race.second.rpartition("/")[2].partition(":")[0]) for race in found}
    assert places >= {
        ("write after read", "blocks.py"),  # dK̃ in the place of dQ̃
        ("read after write", "blocks.py"),
        ("read after write", "backward.py"),
        ("read after write", "transition.py"),
    }


def test_stick_breaking(found, monkeypatch):
    from path_attention.ops.triton import stick_breaking

    monkeypatch.setattr(stick_breaking, "_SHORTEST_PANEL", 128)
    monkeypatch.setattr(stick_breaking, "_ROWS_AT_ONCE", 1)
    inputs = make_inputs(200, heads=(2, 1), dtype=torch.float32)
    run_stick(inputs, "triton")
    rectangle = StickRectangle(inputs.q[:, :70], *inputs[1:], 0.4, True)
    out, rest = rectangle.attend()
    rectangle.backward(out, 0 * rest, 0 * rest, None)
    assert not found


def decode_inputs(encoding: str, T: int, size: int, **options):
    return encoded(encoding, T, heads=(4, 2), size=(size, size), **options)


def test_decoding_over_groups(found):
    from path_attention.ops.triton import decode

    q, k, v, _, _, gate = decode_inputs("path_fox", 300, 16, B=2)
    assert gate is not None
    matrices, fades = torch.randn(2, 4, 2, 16, 16), -torch.rand(2, 4, 4)
    unit = KeyGroup(
        k[:, :256],
        v[:, :256],
        suffix=matrices,
        after=matrices[:, 0],
        decay=gate[:, :256],
        unit_decay=fades,
        after_decay=fades[:, 0],
    )
    tail = KeyGroup(k[:, 256:], v[:, 256:], decay=gate[:, 256:])
    past = Past((unit,), tail, matrices[:, 0], fades[:, 0])
    own = q[:, :3].clone(), gate[:, :3]
    decode.triton_decode(q[:, :3], past, 0.1, gate[:, :3], own)
    assert not found


@pytest.mark.parametrize("factors", [1, 30])
def test_transport(factors, found):
    from path_attention.ops.triton import transport

    q, k, _, w, beta, _ = encoded("path", 36, heads=(4, 2))
    assert w is not None and beta is not None
    w, beta = (x.repeat_interleave(factors, 2) for x in (w, beta))
    transport.triton_transport(q, k, w, beta)
    assert not found


@pytest.mark.parametrize(
    ("encoding", "size", "dtype", "croppable"),
    [
        ("path_fox", 16, torch.float32, False),
        ("path_fox", 16, torch.float16, True),
        ("path", 128, torch.float32, True),
        ("path", 256, torch.float16, False),
        ("fox", 16, torch.float16, True),
        ("fox", 16, torch.float16, False),
        ("nope", 16, torch.float16, True),
    ],
    ids=str,
)
def test_steps_over_a_unit_s_end(encoding, size, dtype, croppable, found):
    """In the middle of the third unit, then over its end, where what is before it is carried on."""
    from path_attention.ops.triton import step

    q, k, v, w, beta, gate = decode_inputs(encoding, 2, size, B=1 if size > 16 else 2)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    kinds = {"moves": w is not None, "fades": gate is not None, "croppable": croppable}
    state = DecodeState.make(k, v, 4, 256, 64, **kinds)
    state.seen.fill_(189)
    for _ in range(2):
        step.triton_decode_step(state, q, k, v, w, beta, gate, None, 0.1)
    assert not found


@pytest.mark.parametrize("kept", [1, 3])
def test_records_of_a_step(kept, found):
    from path_attention.ops.triton import step

    x = torch.randn(2, 3, 40)
    state = DecodeState.make(x[..., None], x[..., None], 40, 256, 64, moves=False, fades=True)
    state.seen.fill_(130)
    before, history = torch.randn(2, kept, 40), torch.randn(2, state.ring_size, 40)
    borders = torch.randn(2, state.units, kept, 40)
    step.triton_record_step(state, x, before, history, borders, torch.rand(2, 3) < 0.5)
    step.triton_record_step(state, x, before, None, None, None)
    assert not found


@pytest.mark.parametrize("of_documents", [False, True])
def test_directions(of_documents, found):
    x = torch.randn(1, 70, 32).requires_grad_()
    weight = torch.randn(32, 4).requires_grad_()
    state = packing = None
    if of_documents:
        packing = Packing.from_lengths([30, 0, 40])
    else:
        state = torch.randn(1, 3, 32).requires_grad_()
    w = householder_directions(x, weight, 2, state=state, packing=packing, implementation="triton")
    w.sum().backward()
    assert not found
