"""flash-linear-attention's format: every weight has its place, both ways, and gates their scale."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from path_attention.conversion import fla
from path_attention.conversion.fla import convert_folder, our_config, their_config
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM, load_model

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
}


def make_model(to: str, **fields) -> PathAttentionForCausalLM:
    torch.manual_seed(0)
    if to == "path_fox":
        fields = {"forget_scale": 16**-0.5, **fields}
    model = PathAttentionForCausalLM(PathAttentionConfig.from_preset(to, **{**SIZES, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return model.eval()


def expected_names(gated: bool, low_rank: bool, tied: bool) -> set[str]:
    """By the format's documentation: the names of a model of two layers."""
    names = {"model.embeddings.weight", "model.norm.weight"} | (
        set() if tied else {"lm_head.weight"}
    )
    for n in range(2):
        block = f"model.layers.{n}"
        parts = ["attn_norm.weight", "mlp_norm.weight", "attn.w_conv1d.weight"]
        parts += [f"attn.{p}_proj.weight" for p in "qkvo"] + ["attn.bt_proj.weight"]
        parts += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")] + ["attn.bt_proj.bias"]
        parts += [f"attn.w_proj.{m}.weight" for m in (0, 1)] if low_rank else ["attn.w_proj.weight"]
        parts += ["attn.g_proj.weight", "attn.g_proj.bias"] if gated else []
        names |= {f"{block}.{part}" for part in parts}
    return names


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [32, None])
@pytest.mark.parametrize("to", ["path", "path_fox"])
def test_there_and_back_again(to: str, rank: int | None, tied: bool, tmp_path) -> None:
    model = make_model(to, direction_rank=rank, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    theirs = convert_folder(tmp_path / "ours", tmp_path / "theirs")
    state = load_file(theirs / "model.safetensors")
    assert set(state) == expected_names(to == "path_fox", rank is not None, tied)
    assert state["model.layers.1.attn.w_conv1d.weight"].shape == (16, 1, 3)
    config = json.loads((theirs / "config.json").read_text())
    assert config["model_type"] == "path_attn" and config["num_heads"] == 2
    assert config["use_low_rank_w"] == (rank is not None)
    back = load_model(convert_folder(theirs, tmp_path / "back"))
    ids = torch.randint(0, 40, (1, 30))
    torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    ours, again = model.state_dict(), back.state_dict()
    assert ours.keys() == again.keys() and all(torch.equal(ours[n], again[n]) for n in ours)


def test_a_kill_leaves_no_half_of_a_folder(tmp_path, monkeypatch) -> None:
    make_model("path").save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fla.shutil, "copy2", killed)
        with pytest.raises(KeyboardInterrupt):
            convert_folder(tmp_path / "ours", tmp_path / "theirs")
    assert (convert_folder(tmp_path / "ours", tmp_path / "theirs") / "tokenizer.json").exists()


def test_their_gates_are_scaled_with_the_scores() -> None:
    """softmax(D^-½ (q H k + Σ log f)): as if scores without gates were scaled, and gates too."""
    config = our_config(
        {"hidden_size": 32, "num_heads": 2, "use_forget_gate": True, "num_hidden_layers": 1}
    )
    assert config.forget_scale == 16**-0.5 and config.decay == "forget"
    model = make_model("path_fox")
    attention = model.model.layers[0].attention
    x = torch.randn(1, 9, 32)
    gates = attention.decay(x, None)
    plain = torch.nn.functional.logsigmoid(attention.decay.forget_proj(x))
    torch.testing.assert_close(gates, plain / 4)


def test_their_defaults_are_known() -> None:
    config = our_config({"hidden_size": 384, "num_heads": 6, "num_hidden_layers": 3})
    assert (config.intermediate_size, config.direction_rank) == (1024, 32)
    assert (config.num_key_value_heads, config.decay) == (6, "none")


@pytest.mark.parametrize(
    "fields",
    [
        {"beta_max": 1.0},
        {"qk_norm": True},
        {"direction_rank": 8},
        {"direction_conv_size": 4},
        {"householders_per_token": 2},
        {"value_head_dim": 8},
        {"qkv_bias": True},
        {"decay": "forget"},
        {"head_dim": 8},
        {"transport": "rotary"},
    ],
    ids=str,
)
def test_what_they_lack_is_refused(fields) -> None:
    (name,) = fields
    name = "forget_scale" if name == "decay" else name
    with pytest.raises(ValueError, match=f"^{name}: expected one of .*flash-linear-attention"):
        their_config(PathAttentionConfig.from_preset("path", **{**SIZES, **fields}))


@pytest.mark.parametrize(
    "fields", [{"use_w_shortconv": False}, {"attnres_block_size": 2}, {"hidden_act": "powlu"}]
)
def test_what_we_lack_is_refused(fields) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=f"^{name}: expected one of"):
        our_config({"hidden_size": 32, "num_heads": 2, **fields})


def test_bad_folders_are_refused(tmp_path) -> None:
    make_model("path").save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="^out: expected a new folder"):
        convert_folder(tmp_path / "ours", tmp_path)
    (tmp_path / "ours" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="^MODEL: expected model_type 'path_attn'"):
        convert_folder(tmp_path / "ours", tmp_path / "new")
