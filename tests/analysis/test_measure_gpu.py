"""Measured on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch
from literal_routes import make_inputs

from path_attention.analysis.measure import Probes, measure
from path_attention.analysis.routes import Routes


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["none", "householder", "two householders", "rotation", "matrices"]
)
def test_sums_are_those_of_the_cpu(kind: str) -> None:
    x = make_inputs(300, 4, 2, 16, kind, gate=True)
    probes = Probes.spread((100, 300), 8, 300)
    here = measure(Routes.of(**x), probes, 40, segment=64)
    there = measure(Routes.of(**{n: t.cuda() for n, t in x.items()}), probes, 40, segment=64)
    assert here.sums.keys() == there.sums.keys()
    for name, sums in here.sums.items():
        # Float64 sums of some thousand terms in another order; no score of this seed lies within
        # rounding of a bin's edge.
        torch.testing.assert_close(there.sums[name], sums, rtol=1e-9, atol=1e-9, msg=name)
    for name, most in here.most.items():
        torch.testing.assert_close(there.most[name], most, rtol=1e-12, atol=0, msg=name)
