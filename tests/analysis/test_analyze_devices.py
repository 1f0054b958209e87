"""A device that is not here is refused by name before anything is measured."""

from __future__ import annotations

import pytest

from path_attention.analysis.simulate import Simulate
from path_attention.analysis.swaps import AnalyzeSwaps
from path_attention.analysis.swaps_trained import AnalyzeSwapsTrained


@pytest.mark.parametrize("command", [Simulate, AnalyzeSwaps, AnalyzeSwapsTrained])
def test_unknown_devices(command, tmp_path):
    with pytest.raises(ValueError, match="device: expected one that is here, got 'tpu'"):
        command(device="tpu", out=tmp_path / "result").run()
    assert not list(tmp_path.iterdir())
