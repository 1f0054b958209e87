"""For kernels run as Python, and on the GPU.

(The folder is not called triton: pytest has tests/ops on the path, where that would be found in the
place of a Triton that is not installed.)
"""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Skips where kernels are compiled: there, test_triton_gpu.py tests them."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here")
