"""How an attention operator hands its gradients to autograd: the same for every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import _get_current_dispatch_mode


def register_gradients(forward: Any, backward: Any, name: str, options: int = 0) -> None:
    """Make custom operator `forward` differentiable once, by custom operator `backward`.

        forward(*inputs, scale, borders, *options) → out, lse, *kept
        backward(grad_out, grad_lse, *inputs, out, lse, *kept, scale, borders) → gradients of inputs

    The inputs are q, k, v and whatever tensors follow. `lse` is any second result of float32 a
    query; `kept` is for the backward pass alone; there are so many `options`, no tensors. A
    gradient of an input that is None is left out; both gradients from above may be missing. A
    second derivative raises RuntimeError naming `name`.
    """

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, scale, borders = inputs[: len(inputs) - options]
        ctx.save_for_backward(*tensors, *output, borders)
        ctx.scale, ctx.count = scale, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])

    def differentiate(ctx: Any, grad_out: Any, grad_lse: Any, *_: Any) -> tuple:
        *saved, borders = ctx.saved_tensors
        inputs, out = saved[: ctx.count], saved[ctx.count]
        if grad_out is None:
            if grad_lse is None:
                return (None,) * (ctx.count + 2 + options)
            grad_out = torch.zeros_like(out)
        grads = backward(grad_out, grad_lse, *saved, ctx.scale, borders)
        given = (None if x is None else g for x, g in zip(inputs, grads, strict=True))
        return *given, *(None,) * (2 + options)

    forward.register_autograd(differentiate, setup_context=keep)
    backward.register_autograd(_refusal(name))


def run(operator: Any, *inputs: Any) -> Any:
    """A custom operator's results: by its function alone where nobody differentiates or watches.

    The way through the dispatcher takes the host as long as several launches.
    """
    return operator._init_fn(*inputs) if is_plain(*inputs) else operator(*inputs)


def is_plain(*inputs: Any) -> bool:
    """Whether nobody differentiates, compiles or watches what is computed of inputs."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if wanted or torch.compiler.is_compiling() or is_watched():
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


def is_watched() -> bool:
    """Whether a mode or a transform (`torch.func`) sees the operators that are called."""
    transformed = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore
    return transformed is not None or _get_current_dispatch_mode() is not None


def refuse_tangents(name: str, *inputs: Tensor | None, instead: str = "definition") -> None:
    """Raise RuntimeError, naming `name`, on inputs of forward mode (`torch.func.jvp`).

    A custom operator would drop their tangents without a word; implementation `instead` does not.
    """
    if torch.compiler.is_compiling():
        return
    if any(x is not None and unpack_dual(x).tangent is not None for x in inputs):
        raise RuntimeError(
            f"path_attention: {name} has no derivatives of forward mode (jvp); "
            f'implementation="{instead}" has them'
        )


def _refusal(name: str) -> Callable[..., None]:
    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"path_attention: {name} is differentiable once, its gradients are not "
            '(create_graph); implementation="definition" has derivatives of every order'
        )

    return refuse
