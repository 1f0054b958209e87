"""Saving, loading, starting on the meta device, and training aids from the ecosystem."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from path_attention.models import PathAttentionForCausalLM, PathAttentionModel, load_model
from path_attention.models.cache import CACHE_NAME


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("preset", ["path_fox", "rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_are_bitwise(make_model, tmp_path, tied: bool, preset: str, dtype) -> None:
    model = make_model(preset, dtype=dtype, tie_word_embeddings=tied, beta_bias_init=-1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)  # nothing is left at its start
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is PathAttentionForCausalLM and not loaded.training
    assert loaded.dtype == dtype
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    shared = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    ids = torch.arange(1, 9)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is PathAttentionModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_missing_weights_start_as_new_ones_and_loaded_ones_stay(make_model, tmp_path) -> None:
    make_model("path").save_pretrained(tmp_path)
    loaded, report = PathAttentionForCausalLM.from_pretrained(
        tmp_path, decay="forget", forget_bias_init=2.0, output_loading_info=True
    )
    assert report["missing_keys"] == {
        f"model.layers.{n}.attention.decay.forget_proj.{kind}"
        for n in range(2)
        for kind in ("weight", "bias")
    }
    gate = loaded.model.layers[0].attention.decay.forget_proj
    assert (gate.bias == 2).all() and 0.1 < gate.weight.std() < 0.3
    kept = make_model("path").state_dict()
    assert all(torch.equal(loaded.state_dict()[name], kept[name]) for name in kept)


def test_meta_device_start_has_the_eager_statistics(make_model) -> None:
    eager = make_model("path_fox", hidden_size=128, beta_bias_init=-1.0)
    with torch.device("meta"):
        late = PathAttentionForCausalLM(eager.config)
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in late.parameters():
            parameter.fill_(torch.nan)
    for module in late.modules():
        module._is_hf_initialized = False
    late.init_weights()
    for (name, a), b in zip(eager.named_parameters(), late.parameters(), strict=True):
        if a.std() == 0 or a.numel() == 1:
            assert torch.equal(a, b), name
        else:
            error = a.std() / a.numel() ** 0.5  # of the mean; of the std it is 0.7 times this
            assert abs(b.std() - a.std()) < 5 * error, name
            assert abs(b.mean() - a.mean()) < 6 * error, name
    assert late(torch.arange(1, 9)[None]).logits.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_leaves_gradients_as_they_are(make_model, reentrant: bool) -> None:
    from path_attention import Packing

    ids = torch.randint(1, 64, (1, 20))
    arguments = {"labels": ids, "packing": Packing.from_lengths([7, 13])}
    gradients = []
    for checkpointing in (False, True):
        model = make_model(dtype=torch.float64).train()
        calls = []
        model.model.layers[0].attention.register_forward_hook(lambda *_, c=calls: c.append(1))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, **arguments).loss.backward()
        assert len(calls) == 1 + checkpointing
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="cache: expected none with gradient checkpointing"):
        model(ids, use_cache=True)


def test_autocast_is_near_float32_and_trains(make_model) -> None:
    model = make_model().train()
    ids = torch.randint(1, 64, (2, 40))
    exact = model(ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(ids, labels=ids)
    assert half.loss.dtype == torch.float32
    assert (half.logits.float() - exact.logits).norm() / exact.logits.norm() < 0.05
    half.loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )


def test_a_model_in_bf16_decodes_as_it_prefills(make_model) -> None:
    model = make_model(dtype=torch.bfloat16)
    ids = torch.randint(1, 64, (2, 40))
    with torch.no_grad():
        full = model(ids).logits.float()
        first = model(ids[:, :20], use_cache=True)
        parts = [first.logits]
        for t in range(20, 40):
            parts.append(model(ids[:, t : t + 1], cache=first[CACHE_NAME]).logits)
    error = (torch.cat(parts, 1).float() - full).norm() / full.norm()
    assert error < 0.02


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "w_proj.0", "beta_proj"], "all-linear"])
def test_lora_trains_its_adapters_alone(make_model, tmp_path, targets) -> None:
    peft = pytest.importorskip("peft")
    model = make_model()
    ids = torch.randint(1, 64, (2, 16))
    plain = model(ids).logits
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).train()
    before = {name: value.clone() for name, value in adapted.named_parameters()}
    optimizer = torch.optim.SGD((p for p in adapted.parameters() if p.requires_grad), lr=1.0)
    for _ in range(2):  # B starts at 0, so A moves from the second step on
        optimizer.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n}
    assert any("beta_proj" in n for n in moved)
    adapted.eval()
    got = adapted(input_ids=ids).logits
    assert not torch.allclose(got, plain)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, got, rtol=1e-3, atol=1e-3)


def test_importing_the_package_needs_torch_alone() -> None:
    code = (
        "import sys, json, path_attention, path_attention.nn\n"
        "print(json.dumps([m for m in ('transformers', 'triton') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "transformers" not in json.loads(out.stdout)


def test_load_model_finds_a_runs_folder_and_names_what_is_wrong(make_model, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"model: expected .*config\.json"):
        load_model(tmp_path)
    make_model().save_pretrained(tmp_path / "model")
    assert type(load_model(tmp_path)) is PathAttentionForCausalLM
    make_model("path").save_pretrained(tmp_path / "less" / "model")
    (tmp_path / "less" / "model" / "config.json").write_bytes(
        (tmp_path / "model" / "config.json").read_bytes()
    )
    with pytest.raises(ValueError, match=r"model: expected every weight .*forget_proj"):
        load_model(tmp_path / "less")
    make_model(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    assert load_model(tmp_path / "tied").config.tie_word_embeddings
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model: expected undamaged files"):
        load_model(tmp_path / "model")
