"""What `test_context_parallel_model.py` runs under torchrun: models over all processes.

Loss, hidden states and gradients are those of one process; documents never leak.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.packing import Packing

T = 90
# one document cut in every run, and small ones; documents that end at cuts, of 1 token, of none
LENGTHS = {"packed": [7, 61, 0, 1, 21], "plain": None, "many": [9, 14, 22, 1, 26, 18]}
# of each kind of exchange one with all lengths; every preset but those that differ in names alone
FULL = {
    "path_fox": {"householders_per_token": 2, "num_key_value_heads": 2, "value_head_dim": 6},
    "rotation_learned_qkv": {},
    "stick_breaking": {"num_key_value_heads": 2, "value_head_dim": 6},
    "path_linear": {"decay": "forget", "num_key_value_heads": 2, "direction_conv_size": 4},
}
SHORT = [
    *((name, {}) for name in ("nope", "rope", "alibi", "fox", "path", "path_alibi", "delta_net")),
    ("rotation_learned", {"normalizer": "stick_breaking"}),
    *((f"rotation_{name}", {}) for name in ("random_qkv", "token", "learned")),
    ("path", {"transport": "rotary_householder", "direction_conv_size": 0}),
    ("fox", {"normalizer": "linear", "qk_norm": True, "output_norm": True}),
]


def make_model(preset: str, dtype: torch.dtype, **fields) -> PathAttentionForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    config = PathAttentionConfig.from_preset(preset, **{**sizes, "direction_rank": 8, **fields})
    model = PathAttentionForCausalLM(config).to(dtype)
    for parameter in model.parameters():  # weights at which every part has something to say
        torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def run(model, ids: Tensor, packing: Packing | None, split: ContextSplit | None) -> dict:
    """Loss, hidden states and gradients; summed over processes under a split.

    The loss that is differentiated is in the model's dtype; its own is float32.
    """
    model.zero_grad()
    whole = ContextSplit.of(T, None, packing).targets(ids)
    targets = whole if split is None else split.take(whole)
    if split is None:
        out = model(ids, labels=ids, packing=packing, output_hidden_states=True, use_cache=False)
        hidden = out.hidden_states[-1].detach()
    else:
        labels = split.targets(ids)
        out = model(split.take(ids), labels=labels, split=split, output_hidden_states=True)
        hidden = split.join(out.hidden_states[-1])
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss / (whole != -100).sum()
    loss.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    found = {"loss": loss.detach(), "own loss": out.loss.detach(), **grads}
    if split is not None:
        found = {name: split.sum(x) for name, x in found.items()}
    return {"hidden": hidden, **found}


def check(preset: str, name: str, dtype: torch.dtype, allowed: float, **fields) -> None:
    model = make_model(preset, dtype, **fields)
    lengths = LENGTHS[name]
    packing = None if lengths is None else Packing.from_lengths(lengths)
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (2 if packing is None else 1, T), generator=rng)
    split = ContextSplit.of(T, dist.group.WORLD, packing)
    exact, found = run(model, ids, packing, None), run(model, ids, packing, split)
    for key, expected in exact.items():
        worst = (found[key] - expected).abs().max().item()
        bound = max(allowed, 1e-6) if key == "own loss" else allowed
        bound *= max(1.0, expected.abs().max().item())
        assert worst <= bound, f"{preset} {fields}, {name}, {key}: off by {worst:.2e} > {bound:.2e}"


def check_presets() -> None:
    """In float64 to 1e-10, and in float32 to 1e-5, of the largest element."""
    for preset, fields in FULL.items():
        for name in LENGTHS:
            check(preset, name, torch.float64, 1e-10, **fields)
    for preset, fields in SHORT:
        check(preset, "packed", torch.float64, 1e-10, **fields)
    for preset, fields in (*FULL.items(), *SHORT):
        check(preset, "packed", torch.float32, 1e-5, **fields)


def check_documents_never_leak() -> None:
    """Other tokens in one document change no other's hidden states, by a bit."""
    packing = Packing.from_lengths(LENGTHS["packed"])
    split = ContextSplit.of(T, dist.group.WORLD, packing)
    ids = torch.arange(T)[None] % 50
    changed = ids.clone()
    changed[:, 7:68] = 3
    for preset in FULL:
        model = make_model(preset, torch.float64)
        with torch.no_grad():
            one, two = (
                split.join(model.model(split.take(x), split=split)[0]) for x in (ids, changed)
            )
        same = [*range(7), *range(68, T)]
        assert torch.equal(one[:, same], two[:, same]), preset
        assert not torch.equal(one, two)


def check_checkpointing() -> None:
    """Blocks that are computed again exchange again, in the same order."""
    model, split = make_model("path_fox", torch.float64), ContextSplit.of(T, dist.group.WORLD)
    ids = torch.arange(T)[None] % 50
    plain = run(model, ids, None, split)
    for block in model.model.layers:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    again = run(model, ids, None, split)
    assert all(torch.equal(plain[key], again[key]) for key in plain)


def check_compiling() -> None:
    """What waits for others is left as it is inside of compiled blocks."""
    for preset in FULL:
        model, split = make_model(preset, torch.float64), ContextSplit.of(T, dist.group.WORLD)
        ids = torch.arange(T)[None] % 50
        plain = run(model, ids, None, split)
        for block in model.model.layers:
            block.compile(backend="eager")
        compiled = run(model, ids, None, split)
        for key, expected in plain.items():
            torch.testing.assert_close(compiled[key], expected, rtol=1e-10, atol=1e-10)


def check_sixteen_bits() -> None:
    """Under autocast what a split changes is within roundings of the largest loss and gradient."""
    model, split = make_model("path_fox", torch.float32), ContextSplit.of(T, dist.group.WORLD)
    ids = torch.arange(T)[None] % 50
    with torch.autocast("cpu", torch.bfloat16):
        found, exact = run(model, ids, None, split), run(model, ids, None, None)
    assert abs(found["loss"] - exact["loss"]) <= 2**-8 * exact["loss"]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_presets()
    check_documents_never_leak()
    check_checkpointing()
    check_compiling()
    check_sixteen_bits()
    dist.barrier()
    print("complete", file=sys.stderr)
    dist.destroy_process_group()
