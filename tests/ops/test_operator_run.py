"""Where a custom operator is called by its function alone, and where by the dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from path_attention.ops.gradients import run

CALLS: list[str] = []


class Operator:
    """Says how it was called."""

    @staticmethod
    def _init_fn(x: torch.Tensor, scale: float) -> torch.Tensor:
        CALLS.append("function")
        return x * scale

    def __call__(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        CALLS.append("dispatcher")
        return x * scale


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def calls() -> list[str]:
    CALLS.clear()
    return CALLS


def test_by_its_function_where_nothing_wants_more(calls) -> None:
    run(Operator(), torch.ones(2), 3.0)
    with torch.no_grad():
        run(Operator(), torch.ones(2, requires_grad=True), 3.0)
        run(Operator(), torch.nn.Parameter(torch.ones(2)), 3.0)
    with torch.inference_mode():
        run(Operator(), torch.ones(2), 3.0)
    assert calls == ["function"] * 4


def test_by_the_dispatcher_where_something_does(calls, monkeypatch) -> None:
    x = torch.ones(2)
    run(Operator(), torch.ones(2, requires_grad=True), 3.0)
    with Watching():
        run(Operator(), x, 3.0)
    with FakeTensorMode() as fake:
        run(Operator(), fake.from_tensor(x), 3.0)
    run(Operator(), fake.from_tensor(x), 3.0)
    run(Operator(), x.as_subclass(Marked), 3.0)
    torch.vmap(lambda y: run(Operator(), y, 3.0))(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    run(Operator(), x, 3.0)
    assert calls == ["dispatcher"] * 7
