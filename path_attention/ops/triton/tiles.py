"""Tile sizes, warps and pipeline depth: one frozen choice for forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from path_attention.ops.triton.device import LARGE_SHARED_MEMORY

# Of a thread. Said outright: left to itself, ptxas has settled for 32 and spilled 19 KB.
MOST_REGISTERS = 255


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """What the kernels of one call are compiled for.

    Attributes:
        D, DV: head sizes; DP, DVP: padded to 64, 128 or 256 (tiles 16 wide gave wrong results on
            sm_90).
        transport, gate: compiled in or out.
        hopper_forward, hopper_queries, hopper_keys: a main loop by `hopper.py`, where that was the
            faster one.
        block_at_once: a block's last head and its UT transform in one launch, where both fit.
        registers: of the backward loops, at most: 168 let three programs share a multiprocessor.
        forward_keys: keys a step of the forward loop; backward_keys, backward_queries: of the two
            backward loops.
    """

    D: int
    DV: int
    DP: int
    DVP: int
    transport: bool
    gate: bool
    forward_keys: int
    forward_warps: int
    forward_stages: int
    backward_keys: int
    queries_warps: int
    queries_stages: int
    backward_queries: int
    keys_warps: int
    keys_stages: int
    registers: int
    pair_warps: int
    pair_part: int
    tree_warps: int
    walk_warps: int
    block_warps: int
    local_warps: int
    block_bwd_warps: int
    block_at_once: bool
    hopper_forward: bool
    hopper_queries: bool
    hopper_keys: bool


def padded(size: int) -> int:
    """A head size as the kernels hold it: 64, 128 or 256."""
    return max(64, 1 << (size - 1).bit_length())


def choose_tiles(
    D: int,
    DV: int,
    dtype: torch.dtype,
    transport: bool,
    gate: bool,
    shared_memory: int,
    warpgroups: bool,
) -> Tiles:
    """The tiles for head sizes D, DV, the kernels' operand dtype and a device's shared memory.

    warpgroups: `hopper.py`'s kernels can run there.
    """
    DP, DVP = padded(D), padded(DV)
    wide = max(DP, DVP)
    single = dtype == torch.float32
    warpgroups = warpgroups and not single
    # Matrix units that read shared memory come with more of it (from Hopper on).
    hopper = shared_memory > LARGE_SHARED_MEMORY
    large = wide <= 64 and not single and hopper
    # Without them, products take their operands from registers, which spill far less in 8 warps.
    warps = 4 if wide <= (128 if hopper else 64) else 8
    loop_warps = warps if hopper else 8
    return Tiles(
        D=D,
        DV=DV,
        DP=DP,
        DVP=DVP,
        transport=transport,
        gate=gate,
        forward_keys=128 if large else 64,
        forward_warps=loop_warps,
        forward_stages={64: 2, 128: 3, 256: 2}[wide],
        backward_keys=64,
        queries_warps=loop_warps,
        queries_stages={64: 3, 128: 2, 256: 1}[wide],
        backward_queries=64,
        keys_warps=loop_warps,
        keys_stages={64: 3, 128: 2, 256: 1}[wide],
        registers=168 if large else MOST_REGISTERS,
        pair_warps=4 if DP <= 64 else 8,
        pair_part=64 if single else min(DP, 128),
        tree_warps=4,
        walk_warps=warps,
        block_warps=warps,
        local_warps=warps,
        block_bwd_warps=8 if wide > 64 else warps,
        block_at_once=hopper and wide <= 64 and not single,  # at 128 it fills one
        hopper_forward=warpgroups and wide == 128,
        hopper_queries=warpgroups and wide == 128,
        hopper_keys=warpgroups and wide <= 128,
    )
