"""How a recipe's model is made: on the meta device, checkpointed, compiled, with fused kernels."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.ops.packing import Packing
from path_attention.training import fused
from path_attention.training.model import build_model, initialise
from path_attention.training.processes import Processes

ALONE = Processes(0, 1, torch.device("cpu"))


def config_of(preset: str, **fields) -> PathAttentionConfig:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 500,
        "rms_norm_eps": 1e-6,
    }
    return PathAttentionConfig.from_preset(preset, **{**sizes, **fields})


def made(recipe, config, **fields) -> nn.Module:
    recipe = dataclasses.replace(recipe, **fields)
    return build_model(recipe, config, torch.float32, ALONE)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_meta_starts_have_the_law_of_whole_ones(make_recipe, tied: bool) -> None:
    """The same constants; normal weights whose moments are within 5 of their standard errors."""
    config = config_of(
        "path_fox", tie_word_embeddings=tied, beta_bias_init=0.5, forget_bias_init=2.0
    )
    whole = made(make_recipe(), config).state_dict()
    meta = made(make_recipe(initialisation="meta"), config)
    assert not any(p.is_meta for p in meta.parameters())
    assert (meta.lm_head.weight is meta.model.embed_tokens.weight) == tied
    assert meta.state_dict().keys() == whole.keys()
    for name, drawn in meta.state_dict().items():
        expected = whole[name]
        if expected.std() == 0 or expected.numel() == 1:
            assert torch.equal(drawn, expected), name
        else:
            assert not torch.equal(drawn, expected), name
            n = drawn.numel()
            assert abs(drawn.mean()) <= 5 * 0.02 / n**0.5, name
            assert abs(drawn.std() / 0.02 - 1) <= 5 / (2 * n) ** 0.5, name


def test_meta_starts_hang_on_seed_and_name_alone(make_recipe) -> None:
    config = config_of("path")
    first, again, other = (
        made(make_recipe(initialisation="meta", seed=seed), config).state_dict()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.attention.q_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("q_proj", "k_proj")])
    deeper = PathAttentionForCausalLM(config_of("path", num_hidden_layers=3))
    initialise(deeper, deeper.config, 0)
    assert torch.equal(deeper.state_dict()[name], first[name])


def test_checkpointing_and_compiling_change_nothing(make_recipe) -> None:
    """Packed documents, loss and every gradient."""
    config, results = config_of("path_fox"), []
    ids = torch.randint(500, (1, 90), generator=torch.Generator().manual_seed(0))
    packing = Packing.from_lengths([40, 3, 47])
    for fields in ({}, {"activation_checkpointing": True}, {"compile": "aot_eager"}):
        model = made(make_recipe(**fields), config)
        loss = model(input_ids=ids, labels=ids, packing=packing, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def kernels() -> SimpleNamespace:
    """liger-kernel's three functions, by their documentation."""

    def rms_norm(x, weight, eps, offset, casting_mode, in_place):
        assert casting_mode == "gemma" and not in_place
        y = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        return (y * (weight.float() + offset)).to(x.dtype)

    def linear_cross_entropy(x, weight, target, *, ignore_index=-100, reduction, accum_dtype):
        assert x.dim() == 2 and x.dtype == weight.dtype and accum_dtype == torch.float32
        return F.cross_entropy(
            (x @ weight.T).float(), target, ignore_index=ignore_index, reduction=reduction
        )

    return SimpleNamespace(
        liger_rms_norm=rms_norm,
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_fused_linear_cross_entropy=linear_cross_entropy,
    )


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_fused_kernels_stand_where_the_modules_stood(make_recipe, precision) -> None:
    config = config_of("path", qk_norm=True)
    ids = torch.randint(500, (1, 60), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 10:20] = -100
    results = []
    for replaced in (False, True):
        model = made(make_recipe(), config)
        if replaced:
            fused.replace_modules(model, kernels())
        names = list(model.state_dict())
        packing = Packing.from_lengths([33, 27])
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            output = model(
                input_ids=ids, labels=labels, packing=packing, num_items_in_batch=7.0,
                use_cache=False,
            )  # fmt: skip
            mean = model(input_ids=ids, labels=labels, use_cache=False).loss.detach()
        output.loss.backward()
        assert (output.logits is None) == replaced and output.loss.dtype == torch.float32
        results.append([output.loss.detach(), mean, *(p.grad for p in model.parameters())])
        assert model(input_ids=ids).logits.shape == (1, 60, 500)
        assert names == list(model.state_dict())
    # the same operations in another order of casts
    rounding = 2e-6 if precision == torch.float32 else 2**-7
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 4 * rounding * one.abs().max().clamp(min=1e-3)


def test_fused_kernels_are_imported_when_asked_for(make_recipe, monkeypatch) -> None:
    with pytest.raises(ValueError, match="fused: expected False on cpu, got True"):
        made(make_recipe(fused=True), config_of("path"))

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(fused.importlib, "import_module", missing)
    with pytest.raises(ValueError, match="fused: expected liger-kernel to be installed"):
        fused.use_fused_kernels(nn.Linear(2, 2), torch.device("cuda"))
