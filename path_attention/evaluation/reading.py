"""Read long texts with any causal language model in bounded memory: in pieces, through its cache.

Log-likelihoods of continuations and greedy answers, of several rows at once. What a row gets does
not depend on the rows beside it, but for the rounding of larger products. A model whose logits are
no numbers is refused (ValueError naming it and the place): its greedy token would be some token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from path_attention.models.cache import CACHE_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE = 2048  # tokens of a row that are read at once
_MOST_LOGITS = 2**27  # of one call: 512 MiB in float32
Row = tuple[Sequence[int], Sequence[int]]


@torch.inference_mode()
def log_likelihoods(
    model: PreTrainedModel, rows: Sequence[Row], piece: int = PIECE
) -> list[tuple[float, bool]]:
    """log p(continuation | context) of each row, and whether it is the greedy continuation.

    Args:
        rows: token ids of (context, continuation), neither of them empty.
        piece: tokens of each row that are read at once; memory depends on it, not on the length.

    Rows are padded behind their end, where no token before can see it, so that no mask is needed.
    """
    ends = [len(context) + len(continuation) for context, continuation in rows]
    tokens = torch.zeros(len(rows), max(ends), dtype=torch.long)
    asked = torch.zeros_like(tokens, dtype=torch.bool)
    for n, (context, continuation) in enumerate(rows):
        tokens[n, : ends[n]] = torch.tensor([*context, *continuation])
        asked[n, len(context) : ends[n]] = True
    inputs, tokens, asked = tokens[:, :-1], tokens[:, 1:], asked[:, 1:]
    total = torch.zeros(len(rows), dtype=torch.float64)
    greedy = torch.ones(len(rows), dtype=torch.bool)
    for at, logits in logits_at(model, inputs, asked.any(0), piece):
        wanted = tokens[:, at].to(logits.device)
        scores = logits.float().log_softmax(-1)
        found = scores.gather(2, wanted[..., None]).squeeze(2).double().cpu()
        total += torch.where(asked[:, at], found, 0.0).sum(1)
        greedy &= ((scores.argmax(-1) == wanted).cpu() | ~asked[:, at]).all(1)
    return list(zip(total.tolist(), greedy.tolist(), strict=True))


def logits_at(
    model: PreTrainedModel, inputs: Tensor, asked: Tensor, piece: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(columns `[K]`, their logits `[B, K, V]`) of each piece of inputs `[B, T]` that has any.

    Args:
        asked: bool `[T]`, the columns whose logits are wanted.
        piece: tokens of each row that are read at once; fewer where many of them are asked.
    """
    most = max(1, _MOST_LOGITS // (len(inputs) * model.config.get_text_config().vocab_size))
    pieces, stop = [], 0
    while stop < inputs.shape[1]:
        start, stop = stop, min(stop + piece, inputs.shape[1])
        columns = asked[start:stop].nonzero().squeeze(1) + start
        if len(columns) > most:
            stop, columns = int(columns[most]), columns[:most]
        pieces.append((start, stop, columns))
    past = new_cache(model) if len(pieces) > 1 else {"use_cache": False}
    for start, stop, columns in pieces:
        keep = (columns - start).to(model.device) if len(columns) else 1
        logits = _call(model, inputs[:, start:stop].to(model.device), keep, **past)
        if len(columns):
            _check(model, logits, columns[None] + 1)
            yield columns, logits


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ended: Callable[[list[int]], bool],
    piece: int = PIECE,
) -> list[list[int]]:
    """The likeliest next token again and again, behind each prompt.

    Args:
        prompts: token ids, none of them empty; shorter ones are padded on their left.
        new_tokens: the most to write.
        ended: told what a row wrote so far, says whether that is all.
        piece: tokens of each prompt that are read at once.
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, prompt in enumerate(prompts):
        ids[n, longest - len(prompt) :] = torch.tensor(prompt)
        mask[n, longest - len(prompt) :] = 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    past = new_cache(model)
    logits = ids.new_empty(0)
    for start in range(0, longest, piece):
        end = min(start + piece, longest)
        place = _place(model, mask[:, :end], end - start)
        logits = _call(model, ids[:, start:end], 1, **past, **place)
    written: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while True:
        read = torch.tensor([[len(prompts[n]) + len(written[n])] for n in going])
        _check(model, logits[going, -1:], read)
        latest = logits[:, -1].argmax(-1, keepdim=True)
        for n in list(going):
            written[n].append(int(latest[n]))
            if len(written[n]) == new_tokens or ended(written[n]):
                going.remove(n)
        if not going:
            return written
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits = _call(model, latest, 1, **past, **_place(model, mask, 1))


def _check(model: PreTrainedModel, logits: Tensor, read: Tensor) -> None:
    """Raise ValueError unless logits `[B, K, V]` are numbers; -∞ of some tokens is one.

    read: tokens before each of them, `[B or 1, K]`.
    """
    bad = ~logits.amax(-1).isfinite().cpu()
    if bad.any():
        raise ValueError(
            f"models: expected logits that are numbers, got others after "
            f"{int(read.expand_as(bad)[bad].min())} tokens from "
            f"{model.name_or_path or type(model).__name__}"
        )


def new_cache(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of a forward that starts a cache; given again, they go on with it."""
    return {"use_cache": True, CACHE_NAME: DynamicCache(config=model.config)}


def _place(model: PreTrainedModel, mask: Tensor, count: int) -> dict[str, Tensor]:
    """Mask and positions of the last `count` columns; none where no row is padded."""
    if mask.all():
        return {}
    place = {"attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        place["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
    return place


def _call(model: PreTrainedModel, ids: Tensor, keep: Tensor | int, **arguments: Any) -> Tensor:
    """Logits `[B, K, V]` of some columns. Raises ValueError on a model that can't choose them."""
    logits = model(input_ids=ids, logits_to_keep=keep, **arguments).logits
    count = keep if isinstance(keep, int) else len(keep)
    if logits.shape[1] != count:
        raise ValueError(
            f"models: expected a model that gives logits at the {count} positions in "
            f"`logits_to_keep`, got {logits.shape[1]} from {type(model).__name__}"
        )
    return logits
