"""On an NVIDIA GPU: a whole conversion in bfloat16, and flash-linear-attention's own forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from families import make_teacher
from small_conversion import small_conversion

from path_attention.conversion.fla import convert_folder
from path_attention.conversion.pipeline import convert
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.results import read_result

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("start", ["rope_decay", "exchange"])
def test_a_conversion_in_bfloat16_comes_nearer_to_its_teacher(start, corpora, tmp_path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    model = make_teacher("llama", vocab_size=corpora[0].vocab_size, num_key_value_heads=2, **sizes)
    model.save_pretrained(tmp_path / "teacher")
    corpora[0].tokenizer().save_pretrained(tmp_path / "teacher")
    recipe = small_conversion([corpus.path for corpus in corpora], start=start)
    recipe = dataclasses.replace(recipe, device="cuda", precision="bfloat16")
    stages = {
        name: dataclasses.replace(getattr(recipe, name), tokens=20 * 128)
        for name in ("attention", "logits")
    }
    none = dataclasses.replace(recipe.pretraining, tokens=0)
    recipe = dataclasses.replace(recipe, pretraining=none, **stages)
    convert(tmp_path / "teacher", recipe, tmp_path / "out")
    rows = read_result(tmp_path / "out" / "report.json")["rows"]
    first, middle, last = (row["kl"] for row in rows if row["by"] == "model")
    assert last < (middle if start == "exchange" else first)
    errors = [r["error"] for r in rows if r["by"] == "layer" and r["stage"] == "attention"]
    assert len(errors) == 2 and max(errors) < 1


@pytest.mark.parametrize("rank", [32, None])
@pytest.mark.parametrize("to", ["path", "path_fox"])
def test_flash_linear_attention_computes_the_same(to, rank, tmp_path) -> None:
    """Both in bfloat16; each is a few roundings a layer from the other."""
    pytest.importorskip("fla.models")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    scale = {"forget_scale": 64**-0.5} if to == "path_fox" else {}
    config = PathAttentionConfig.from_preset(
        to,
        vocab_size=300,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        direction_rank=rank,
        initializer_range=0.1,
        **scale,
    )
    ours = PathAttentionForCausalLM(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) / 20)
    ours.save_pretrained(tmp_path / "ours")
    folder = convert_folder(tmp_path / "ours", tmp_path / "theirs")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    ids = torch.randint(0, 300, (1, 512), device="cuda")
    ours = ours.to(torch.bfloat16).cuda().eval()
    with torch.no_grad():
        a = ours(ids, use_cache=False).logits.float()
        b = theirs(ids, use_cache=False).logits.float()
        for layer in ours.model.layers:  # the gate's scale shows, if there is a gate
            layer.attention.decay.scale = 1.0
        c = ours(ids, use_cache=False).logits.float()
    error = (a - b).norm() / a.norm()
    assert error < 0.03
    assert ((c - b).norm() / a.norm() > 3 * error) == (to == "path_fox")
