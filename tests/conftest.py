"""What every test may use: fixed seeds, and fresh memory that is NaN until it is written.

Without a GPU, Triton's kernels run as Python by its interpreter. It wants to know before it is
imported, whichever test does that first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

HAS_GPU = torch.cuda.is_available() and torch.version.cuda is not None
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(skip)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", help="write how many cases of each test passed, as a result")


def pytest_terminal_summary(terminalreporter) -> None:
    """With --results, as `results/gpu_tests.json`: which tests ran, and came to what."""
    path = terminalreporter.config.getoption("results")
    if path is None:
        return
    from path_attention.results import command_line, make_result, write_result

    cases: dict[tuple[str, str], Counter] = {}
    for kind, name in (
        ("passed", "passed"),
        ("failed", "failed"),
        ("error", "failed"),
        ("skipped", "skipped"),
    ):
        for report in terminalreporter.stats.get(kind, []):
            file, _, test = report.nodeid.partition("::")
            cases.setdefault((file, test.partition("[")[0]), Counter())[name] += 1
    names = ("passed", "failed", "skipped")
    rows = [
        {"file": file, "test": test, **{name: found[name] for name in names}}
        for (file, test), found in sorted(cases.items())
    ]
    what = "Cases of each test marked gpu that passed, failed or were skipped"
    command = command_line(["pytest", *terminalreporter.config.invocation_params.args])
    device = "cuda" if HAS_GPU else "cpu"
    write_result(path, make_result(what=what, rows=rows, device=device, command=command))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its like return with NaN, so that reading it shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(100).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies bfloat16's bits as integers: here it widens them first.

    (It also cuts numbers off where it makes them bfloat16, so what is rounded errs twice as much.)
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def product(self, a, b, *rest):
        return plain(self, wide(a), wide(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
