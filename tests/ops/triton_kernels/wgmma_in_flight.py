"""Reads Hopper's machine code for what a matrix product in flight must be left alone with.

    python wgmma_in_flight.py 90:128:hopper_path_fox:bfloat16:232448 …

A product (HGMMA) reads its left operand and its sums from registers until a WARPGROUP.DEPBAR waits
for its group. The compiler trusts the program that nobody touches these before (the PTX manual:
undefined behaviour): a loop that converts the next shares before the wait is compiled without a
word, and wrong. Nor must products be serialised, each waiting for the one before. Arguments as in
compile_kernels.py; one line of JSON a kernel: its name, groups in its PTX and its machine code,
exponentials while one is in flight, what touches its registers then, and operands that the round
before has written. (Code is read in the order of its addresses, in which loops lie whole; each loop
is read twice.)
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import compile_kernels
import torch
import triton
from triton.backends.compiler import GPUTarget

from path_attention.benchmarks import compiled

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?(\S+)\s*(.*?);")
NO_RESULT = ("ST", "BAR", "SYNCS", "UTMA", "RED", "BRA", "BRX", "EXIT")
WIDTHS = {".64": 2, ".WIDE": 2, ".128": 4}


class Group:
    """Products committed together: registers of their sums, and of operands they read."""

    def __init__(self):
        self.sums: set[int] = set()
        self.operands: set[int] = set()


def products_in_flight(sass: str) -> tuple[int, int, list[str]]:
    """Groups of products; exponentials while one is in flight; what touches its registers."""
    flying: list[Group] = []
    opened: Group | None = None
    committed, exponentials, wrong = 0, 0, []
    for address, name, rest, again in _instructions(sass):
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(rest.split(",")[1], 16)
            flying = flying[len(flying) - left :] if left < len(flying) else flying
        elif name.startswith("HGMMA"):
            operands = [x.strip() for x in rest.split(",")]
            first = int(operands[0][1:])
            sums = set(range(first, first + int(re.findall(r"64x(\d+)x16", name)[0]) // 2))
            left = re.fullmatch(r"R(\d+)", operands[1])
            read = set() if left is None else set(range(int(left[1]), int(left[1]) + 4))
            if any(sums & (g.sums | g.operands) or read & g.sums for g in flying):
                wrong.append(f"{address} {name} {rest}")
            opened = opened or Group()
            opened.sums |= sums
            opened.operands |= read
            if "gsb0" in rest:
                flying.append(opened)
                opened, committed = None, committed + (not again)
        else:
            written, read = _registers(name, rest)
            every = flying if opened is None else [*flying, opened]
            exponentials += bool(every) and name.startswith("MUFU.EX2") and not again
            if any(written & (g.sums | g.operands) or read & g.sums for g in every):
                wrong.append(f"{address} {name} {rest}")
    return committed, exponentials, wrong


def carried_operands(sass: str) -> list[str]:
    """Products in a loop whose left operand's registers the round before has written.

    The forward loop's shares are meant to be. An operand that stays (queries, keys) is not: the
    compiler has given its registers to another one (seen with ptxas 12.8 where products were in
    flight from one round to the next).
    """
    code, found = INSTRUCTION.findall(sass), []
    loops = _loops(code)
    for end, start in loops.items():
        if any(start <= inner < end for inner in loops):
            continue  # an outer one
        loop = code[start:end]
        fresh: set[int] = set()
        late = set().union(*(_registers(*x[1:])[0] for x in loop if not x[1].startswith("HGMMA")))
        for address, name, rest in loop:
            left = re.match(r"R\d+, R(\d+), ", rest) if name.startswith("HGMMA") else None
            if left is None:
                fresh |= _registers(name, rest)[0]
            elif (read := set(range(int(left[1]), int(left[1]) + 4)) - fresh) & late:
                found.append(f"{address} {name} {rest}: R{min(read)}")
    return found


def _loops(code: list[tuple[str, str, str]]) -> dict[int, int]:
    """Of each branch back to an earlier instruction: where it is, and where it goes."""
    places = {int(address, 16): n for n, (address, *_) in enumerate(code)}
    found = {}
    for n, (_, name, rest) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name.startswith("BRA") and target is not None:
            start = places.get(int(target[1], 16), n)
            if start < n:
                found[n] = start
    return found


def _instructions(sass: str) -> Iterator[tuple[str, str, str, bool]]:
    """Address, name, operands; a loop's once more after it (True), as what it starts may still be
    in flight in its next round."""
    code = INSTRUCTION.findall(sass)
    loops = _loops(code)
    for n, (address, name, rest) in enumerate(code):
        yield address, name, rest, False
        yield from ((*x, True) for x in code[loops.get(n, n) : n])


def _registers(name: str, rest: str) -> tuple[set[int], set[int]]:
    """Registers that an instruction writes and reads (of wide reads, the first)."""
    named = [int(n) for n in re.findall(r"\bR(\d+)\b", rest)]
    if name.startswith(NO_RESULT) or not re.match(r"R\d", rest):
        return set(), set(named)
    width = max((n for mark, n in WIDTHS.items() if mark in name), default=1)
    return set(range(named[0], named[0] + width)), set(named[1:])


def machine_code(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(compiled._CUOBJDUMP), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    for spec in sys.argv[1:]:
        _, D, encoding, dtype, shared_memory = spec.split(":")
        with compiled.recorded(*compile_kernels.MODULES) as seen:
            compile_kernels.launches(int(D), encoding, getattr(torch, dtype), int(shared_memory))
        for launch in seen:
            name = launch.kernel.fn.__name__
            if "hopper" not in name:
                continue
            source, target = compiled._source(launch), GPUTarget("cuda", 90, 32)
            made = triton.compile(source, target=target, options={"num_warps": 4})
            sass = machine_code(made.asm["cubin"])
            groups, exponentials, wrong = products_in_flight(sass)
            asked = made.asm["ptx"].count("wgmma.commit_group")
            row = {"kernel": name, "asked": asked, "groups": groups, "exponentials": exponentials}
            print(json.dumps({**row, "wrong": wrong, "carried": carried_operands(sass)}))


if __name__ == "__main__":
    main()
