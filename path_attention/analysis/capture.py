"""The routes of each layer of a model, as its own layers make them of real tokens.

One pass of the model; each layer is handed on while it runs and kept no longer, so that memory is
the pass's own and one layer's, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from path_attention.analysis.routes import Routes
from path_attention.nn.attention import Attention
from path_attention.nn.encoding import (
    AccumulatedRotation,
    Chunk,
    Moved,
    Rotary,
    RotaryHouseholder,
    Transport,
)
from path_attention.nn.normalizer import NORMALIZERS

Visit = Callable[[int, Routes], None]  # (number of the layer, its routes)


def attention_layers(model: nn.Module) -> list[Attention]:
    """The model's attention layers in order. Raises ValueError if there is none of ours."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ValueError(f"model: expected layers of ours, got {type(model).__name__} without any")
    return layers


@torch.no_grad()
def visit_layers(model: nn.Module, input_ids: Tensor, visit: Visit) -> None:
    """Let a model read one sequence `[1, T]` and call `visit` with each layer's routes.

    Raises:
        ValueError: on more than one sequence, or a model without layers of ours.
    """
    if input_ids.dim() != 2 or len(input_ids) != 1:
        raise ValueError(f"input_ids: expected one sequence [1, T], got {list(input_ids.shape)}")
    hooks: list[Any] = []
    for number, layer in enumerate(attention_layers(model)):
        bare: dict[str, Any] = {}

        def before(_: nn.Module, arguments: tuple[Any, ...], bare: dict[str, Any] = bare) -> None:
            bare["arguments"] = arguments

        def attend(
            _: nn.Module,
            arguments: tuple[Moved, Tensor | None],
            number: int = number,
            layer: Attention = layer,
            bare: dict[str, Any] = bare,
        ) -> None:
            visit(number, routes_of(layer, bare.pop("arguments"), *arguments))

        hooks.append(layer.transport.register_forward_pre_hook(before))
        hooks.append(layer.normalizer.register_forward_pre_hook(attend))
    body: Any = getattr(model, "model", model)  # without the head: its logits are not wanted
    try:
        body(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def routes_of(
    layer: Attention,
    bare: tuple[Tensor, Tensor, Tensor, Tensor, Chunk],
    moved: Moved,
    log_forget: Tensor | None,
) -> Routes:
    """A layer's routes from its transport's inputs and its normalizer's, of one sequence.

    Raises ValueError on packed documents.
    """
    x, q, k, v, chunk = bare
    if chunk.packing is not None:
        raise ValueError("packing: expected one document, got packed ones")
    dtype = torch.promote_types(q.dtype, torch.float32)

    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[0].to(dtype)

    w, beta = own(moved.w), own(moved.beta)
    if w is not None and w.dim() == 3 and beta is not None:
        w, beta = w[:, :, None], beta[:, :, None]
    bare_q, bare_k = q[0].to(dtype), k[0].to(dtype)
    still = moved.q is q and moved.k is k
    name = next(n for n, cls in NORMALIZERS.items() if type(layer.normalizer) is cls)
    return Routes(
        q=bare_q if still else moved.q[0].to(dtype),
        k=bare_k if still else moved.k[0].to(dtype),
        v=moved.v[0].to(dtype),
        bare_q=bare_q,
        bare_k=bare_k,
        scale=layer.scale,
        w=w,
        beta=beta,
        turns=_turns(layer.transport, x, q, k, v, chunk),
        log_forget=own(log_forget),
        normalizer=name,
    )


def _turns(
    transport: Transport, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk
) -> Tensor | None:
    """e^{iΦ} of a rotating transport, from where it turns (1, 0) in each pair."""
    if not isinstance(transport, (AccumulatedRotation, Rotary, RotaryHouseholder)):
        return None
    dtype = torch.promote_types(q.dtype, torch.float32)
    half = k.shape[3] // 2
    unit = torch.cat([k.new_ones(*k.shape[:3], half), k.new_zeros(*k.shape[:3], half)], -1)
    one = unit.to(dtype)
    found = transport.forward(x, one, one, torch.zeros_like(v), chunk).k[0]  # no hooks
    return torch.complex(found[..., :half], found[..., half:])
