"""One PaTH layer with hand-set weights that tracks five items under swaps, for any length.

The NC¹-complete problem of arXiv 2505.16381 §2 that no transformer with a fixed position encoding
is believed to solve at any length with a fixed number of layers. With β = 2 and w = (e_a − e_b)/√2
a factor H is the swap of coordinates a and b, so a product of factors is the permutation so far:

    H_1 ⋯ H_t e_p = e_c   where c is the item at position p after t swaps.

The five items come first, as tokens whose keys are e_1 … e_5. Head 1 reads: ASK p has the query
L e_p, finds item c and copies it. Head 2 decides: CLAIM p x looks for L e_p + L e'_x, where e' are
coordinates that no swap moves, so item x scores 2L if it is at p and L at most if not; a resting
place at 1.5 L takes the attention of a wrong claim. No other part of the model does anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.nn.normalization import RMSNorm

ITEMS = 5
SWAPS = tuple(combinations(range(ITEMS), 2))
CLAIMS = tuple(product(range(ITEMS), range(ITEMS)))
# Token ids: items, swaps, questions, claims, the two answers to a claim.
SWAP = ITEMS
ASK = SWAP + len(SWAPS)
CLAIM = ASK + ITEMS
YES = CLAIM + len(CLAIMS)
NO = YES + 1
VOCABULARY = NO + 1

HIDDEN, HEADS, HEAD = 64, 2, 16
_ANSWER = VOCABULARY  # residual coordinates behind the embeddings': five items, then yes less no
_FIXED = ITEMS  # head coordinates that no swap moves: e' …
_REST = 2 * ITEMS  # … and the resting place
_ELSEWHERE = HEAD - 1  # direction of tokens that move nothing (their β is 0)
_UNIT = HIDDEN**0.5  # of a normalised one-hot embedding


def swap_tracker(beta_max: float = 2.0, sharpness: float = 40.0) -> PathAttentionForCausalLM:
    """The model in float32; `.to(torch.bfloat16)` loses no weight.

    Args:
        beta_max: bound on β. Below 2 a swap keeps (beta_max − 1) of what it moves; at 1 or below
            it forgets which of two items was where.
        sharpness: L, the score of what is looked for; softmax gives it all but N·exp(−L) of N
            tokens.
    """
    config = PathAttentionConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        head_dim=HEAD,
        intermediate_size=1,
        rms_norm_eps=1e-12,  # nothing beside the mean square of a one-hot row, in float32
        tie_word_embeddings=False,
        transport="householder",
        decay="none",
        direction_rank=None,
        direction_conv_size=0,
        beta_max=beta_max,
    )
    model = PathAttentionForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1)
        _set_weights(model, sharpness)
    return model


def _set_weights(model: PathAttentionForCausalLM, sharpness: float) -> None:
    body: Any = model.model
    attention, lm_head = body.layers[0].attention, model.lm_head
    body.embed_tokens.weight.copy_(torch.eye(VOCABULARY, HIDDEN))
    looked_for = sharpness * HEAD**0.5  # the layer's scale is D^-½
    plus, minus = opposite_inputs()
    rows: dict[str, nn.Linear] = {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "w": attention.transport.w_proj,
    }

    def put(matrix: str, head: int, coordinate: int, token: int, value: float) -> None:
        rows[matrix].weight[head * HEAD + coordinate, token] += value / _UNIT

    for x in range(ITEMS):
        for head in range(HEADS):
            put("k", head, x, x, 1)
        put("k", 1, _FIXED + x, x, 1)
        put("v", 0, x, x, 1)
        put("v", 1, 0, x, 1)  # yes
    put("k", 1, _REST, NO, 1)
    put("v", 1, 0, NO, -1)
    for p in range(ITEMS):
        put("q", 0, p, ASK + p, looked_for)
    for n, (p, x) in enumerate(CLAIMS):
        put("q", 1, p, CLAIM + n, looked_for)
        put("q", 1, _FIXED + x, CLAIM + n, looked_for)
        put("q", 1, _REST, CLAIM + n, 1.5 * looked_for)
    for token in range(VOCABULARY):
        for head in range(HEADS):
            if SWAP <= token < ASK:
                a, b = SWAPS[token - SWAP]
                put("w", head, a, token, plus)
                put("w", head, b, token, minus)
            else:
                put("w", head, _ELSEWHERE, token, 1)
    # σ is 1 for swaps and 0 for all others, to the last bit.
    attention.transport.beta_proj.weight[:, SWAP:ASK] = 320 / _UNIT
    attention.transport.beta_proj.bias.fill_(-200)
    for x in range(ITEMS):
        attention.o_proj.weight[_ANSWER + x, x] = 1
        lm_head.weight[x, _ANSWER + x] = 1
    attention.o_proj.weight[_ANSWER + ITEMS, HEAD] = 1
    lm_head.weight[YES, _ANSWER + ITEMS] = 1
    lm_head.weight[NO, _ANSWER + ITEMS] = -1


def opposite_inputs() -> tuple[float, float]:
    """Two bfloat16 numbers whose SiLU are opposite: directions come from behind a SiLU.

    Of all such pairs of a positive and a negative number down to −1 (SiLU falls until −1.28) the
    one whose sum of SiLUs is least beside them.
    """
    bits = torch.arange(0x3C00, 0x3F80, dtype=torch.int32)  # bfloat16 from 2⁻⁷ to 1
    x = (bits << 16).view(torch.float32).double()
    up, down = nn.functional.silu(x), nn.functional.silu(-x)
    off = ((up[:, None] + down) / up[:, None]).abs()
    i, j = divmod(int(off.argmin()), len(x))
    return x[i].item(), -x[j].item()


@dataclass(frozen=True)
class Sequence:
    """Swaps with questions and claims in between.

    Attributes:
        tokens: int64 `[T]`: the five items, NO as the resting place, then swaps and questions.
        places: int64 `[N]`, where the questions and claims are.
        answers: int64 `[N]`, the token that is right there.
        swaps: int64 `[N]`, the number of swaps before each.
    """

    tokens: Tensor
    places: Tensor
    answers: Tensor
    swaps: Tensor


def make_sequence(swaps: int, every: int, generator: torch.Generator) -> Sequence:
    """Random swaps; after each `every` of them a question and a claim, right half the time.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    for name, value in (("swaps", swaps), ("every", every)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    drawn = torch.randint(len(SWAPS), (swaps,), generator=generator).tolist()
    items = list(range(ITEMS))  # at each position
    tokens = [*range(ITEMS), NO]
    places, answers, counts = [], [], []
    for n, swap in enumerate(drawn, 1):
        a, b = SWAPS[swap]
        items[a], items[b] = items[b], items[a]
        tokens.append(SWAP + swap)
        if n % every:
            continue
        p, q, x, right = torch.randint(ITEMS, (4,), generator=generator).tolist()
        x = items[q] if right % 2 else x
        asked = (ASK + p, items[p]), (CLAIM + q * ITEMS + x, YES if items[q] == x else NO)
        for token, answer in asked:
            places.append(len(tokens))
            answers.append(answer)
            counts.append(n)
            tokens.append(token)
    return Sequence(*(torch.tensor(x) for x in (tokens, places, answers, counts)))


@torch.no_grad()
def right_answers(model: PathAttentionForCausalLM, sequence: Sequence) -> Tensor:
    """bool `[N]`: whether the model's likeliest token at each question and claim is the answer."""
    device = model.lm_head.weight.device
    hidden = model.model(sequence.tokens[None].to(device), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[0, sequence.places.to(device)])
    return logits.argmax(-1).cpu() == sequence.answers


def exact_until(sequence: Sequence, right: Tensor) -> int:
    """The last number of swaps, of those asked at, up to which every answer is right."""
    wrong = sequence.swaps[~right]
    first_wrong = int(wrong.min()) if len(wrong) else int(sequence.swaps.max()) + 1
    return max((n for n in sequence.swaps.tolist() if n < first_wrong), default=0)
