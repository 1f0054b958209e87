"""In the machine code of Hopper's kernels nobody touches the registers of a product in flight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
SAFE = """
/*0010*/ HGMMA.64x128x16.F32 R24, gdesc[UR12], RZ, !UPT, gsb0 ;
/*0020*/ HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR12].tnspB, R88, gsb0 ;
/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
/*0040*/ FADD R24, R25, R26 ;
/*0050*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
/*0060*/ F2FP.BF16.F32.PACK_AB R121, R25, R24 ;
"""
SHARES_TOO_EARLY = SAFE.replace("FADD R24", "F2FP.BF16.F32.PACK_AB R121")
SUMS_TOO_EARLY = SAFE.replace("R25, R26", "R25, R90")
NEXT_ROUND = """
/*0010*/ FADD R24, R25, R26 ;
/*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
/*0030*/ HGMMA.64x128x16.F32 R24, gdesc[UR12], RZ, !UPT, gsb0 ;
/*0040*/ @P0 BRA 0x10 ;
/*0050*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
STAYS = """
/*0010*/ LDSM.16.M88.4 R120, [R12] ;
/*0020*/ HGMMA.64x64x16.F32 R24, R120, gdesc[UR12], RZ, !UPT, gsb0 ;
/*0030*/ F2FP.BF16.F32.PACK_AB R160, R25, R24 ;
/*0040*/ HGMMA.64x64x16.F32.BF16 R88, R160, gdesc[UR12].tnspB, R88, gsb0 ;
/*0050*/ @P0 BRA 0x20 ;
"""
GIVEN_AWAY = STAYS.replace("R160", "R120")


def in_flight(*arguments: str, code: str | None = None) -> str:
    """What wgmma_in_flight.py says, in a process that does not interpret."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    start = [str(HERE / "wgmma_in_flight.py")] if code is None else ["-c", code]
    command = [sys.executable, *start, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_operand_that_stays():
    code = "import sys, wgmma_in_flight as w\nfor x in sys.argv[1:]: print(w.carried_operands(x))"
    stays, given = in_flight(STAYS, GIVEN_AWAY, code=code).splitlines()
    assert stays == "[]" and "0020 HGMMA" in given


def test_what_counts_as_touched():
    code = "import sys, wgmma_in_flight as w\nfor x in sys.argv[1:]: print(w.products_in_flight(x))"
    codes = (SAFE, SHARES_TOO_EARLY, SUMS_TOO_EARLY, NEXT_ROUND)
    found = in_flight(*codes, code=code).splitlines()
    assert found[0] == "(2, 0, [])"
    assert "0040 F2FP" in found[1] and "0040 FADD" in found[2]
    assert found[3] == "(1, 0, ['0010 FADD R24, R25, R26 '])"


@pytest.mark.parametrize(
    ("D", "encoding"),
    [
        (128, "path_fox"),
        pytest.param(64, "path_fox", marks=pytest.mark.slow),
    ],
)
def test_hopper_kernels(D, encoding):
    output = in_flight(f"90:{D}:hopper_{encoding}:bfloat16:{227 * 1024}")
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == (3 if D == 128 else 1)
    for row in rows:
        assert row["groups"] == row["asked"] > 0, f"{row['kernel']}: products are serialised"
        assert not row["wrong"], f"{row['kernel']}: {row['wrong'][:3]}"
        # The forward loop's shares are the round before's; queries and keys stay what they were.
        assert bool(row["carried"]) == row["kernel"].startswith("meet_fwd"), row["carried"][:3]
    if D == 128:  # both warpgroups' two loops, 64 a thread and tile, beside the values' product
        assert rows[0]["kernel"] == "meet_fwd_hopper_kernel" and rows[0]["exponentials"] >= 4 * 64
