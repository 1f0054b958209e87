"""A converted model with its transport set back to RoPE is the teacher, for every family."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, ROPES, make_teacher

from path_attention import Packing
from path_attention.conversion.teacher import (
    as_teacher,
    copy_model,
    load_pretrained,
    load_teacher,
    load_teacher_config,
    load_teacher_tokenizer,
    student_config,
    teacher_config,
)
from path_attention.nn.encoding import RotaryHouseholder


def test_ropes_cover_every_kind() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # "proportional" turns parts of a head: refused below
    assert {r["rope_type"] for r in ROPES.values()} >= set(ROPE_INIT_FUNCTIONS) - {"proportional"}


@pytest.mark.parametrize("family", FAMILIES)
def test_set_back_to_rope_gives_the_teachers_logits(family: str) -> None:
    model = make_teacher(family)
    ids = torch.randint(0, 61, (2, 70))
    expected = model(ids).logits
    teacher = as_teacher(model)
    student = copy_model(teacher.model, student_config(teacher.model.config, "path_fox"))
    back = copy_model(student, student_config(teacher.model.config, "rope"))
    assert expected.std() > 0.5  # far from zero, so the bound says something
    for ours in (teacher.model, back):
        torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=1e-4)
    assert (student(ids).logits - expected).abs().max() > 0.1  # RoPE is missing
    alone = [model(part[None]).logits for part in ids[0].split([30, 40])]
    packed = back(ids[:1], packing=Packing.from_lengths([30, 40])).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope", ROPES)
def test_every_kind_of_scaled_rope(rope: str) -> None:
    model = make_teacher("llama", rope_parameters=dict(ROPES[rope]), max_position_embeddings=128)
    teacher = as_teacher(model)
    ids = torch.randint(0, 61, (1, 60))
    expected = model(ids).logits
    torch.testing.assert_close(teacher.model(ids).logits, expected, rtol=0, atol=1e-4)
    plain = make_teacher("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    changed = (plain(ids).logits - expected).abs().max() > 1e-2
    assert changed == (rope != "dynamic")  # within its window that is plain RoPE
    if teacher.window is not None:
        teacher.check_length(teacher.window)
        with pytest.raises(ValueError, match="context_length: expected at most"):
            teacher.check_length(teacher.window + 1)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_the_factor_of_scaled_rope_spares_layers_without_rope(attention_bias: bool) -> None:
    rope = {**ROPES["yarn"], "attention_factor": 1.7}
    model = make_teacher("smollm3", rope_parameters=rope, attention_bias=attention_bias)
    teacher = as_teacher(model)
    ids = torch.randint(0, 61, (1, 60))
    expected = model(ids).logits
    back = copy_model(
        copy_model(teacher.model, student_config(teacher.model.config, "path")),
        student_config(teacher.model.config, "rope"),
    )
    for ours in (teacher.model, back):
        torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=1e-4)


def test_weights_are_copied_bit_for_bit() -> None:
    model = make_teacher("qwen3")
    teacher = as_teacher(model)
    student = copy_model(teacher.model, student_config(teacher.model.config, "path"))
    ours = {id(p) for p in student.parameters()}
    old = [p for n, p in student.named_parameters() if ".transport." not in n]
    theirs = list(model.parameters())
    assert len(old) == len(theirs) and len(ours) > len(old)
    sums = sorted(float(p.detach().double().abs().sum()) for p in old)
    assert sums == sorted(float(p.detach().double().abs().sum()) for p in theirs)


@pytest.mark.parametrize("family", ["llama", "qwen2_untied"])
def test_from_a_folder_and_from_our_own(family: str, tmp_path) -> None:
    model = make_teacher(family)
    model.save_pretrained(tmp_path / "theirs")
    ids = torch.randint(0, 61, (1, 20))
    teacher = load_teacher(tmp_path / "theirs")
    torch.testing.assert_close(teacher.model(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    teacher.model.save_pretrained(tmp_path / "run" / "model")
    again = load_teacher(tmp_path / "run")
    assert torch.equal(again.model(ids).logits, teacher.model(ids).logits)


def test_end_tokens_are_those_the_model_generates_by(tmp_path) -> None:
    """A chat model's end of a turn stands in its generation_config.json alone (Llama 3)."""
    model = make_teacher("llama")
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path / "theirs")
    config, _ = load_teacher_config(tmp_path / "theirs")
    assert config.eos_token_id == [2, 5] == as_teacher(model).model.config.eos_token_id
    assert model.config.eos_token_id == 2
    teacher = load_teacher(tmp_path / "theirs").model
    student = copy_model(teacher, student_config(config, "path"))
    student.save_pretrained(tmp_path / "ours")
    assert load_pretrained(tmp_path / "ours").generation_config.eos_token_id == [2, 5]
    (tmp_path / "theirs" / "generation_config.json").unlink()
    assert load_teacher_config(tmp_path / "theirs")[0].eos_token_id == 2


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_the_exchange_starts_at_the_teacher_and_ends_at_path(family: str) -> None:
    teacher = as_teacher(make_teacher(family))
    config = teacher.model.config
    kept = copy_model(teacher.model, student_config(config, "path", keep_rope=True))
    plain = copy_model(kept, student_config(config, "path"))
    ids = torch.randint(0, 61, (1, 40))
    transports = [layer.attention.transport for layer in kept.model.layers]
    for transport in transports:
        torch.nn.init.constant_(transport.beta_proj.bias, -40.0)
        torch.nn.init.zeros_(transport.beta_proj.weight)
    torch.testing.assert_close(kept(ids).logits, teacher.model(ids).logits, rtol=0, atol=1e-5)
    plain.load_state_dict(kept.state_dict())
    for transport in transports:
        if isinstance(transport, RotaryHouseholder):  # a layer without RoPE has none to exchange
            transport.set_share(0.0)
    torch.testing.assert_close(kept(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mistral", {"sliding_window": 16}, "sliding"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "slid",
        ),
        ("llama", {"hidden_act": "gelu"}, "activation 'silu', got 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_it_can_not_convert_is_refused(family: str, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^MODEL: expected.*{message}"):
        teacher_config(make_teacher(family, **fields).config)


def test_unknown_architectures_and_targets_are_refused(tmp_path) -> None:
    from transformers import GPT2Config

    with pytest.raises(ValueError, match="MODEL: expected one of the families.*'gpt2'"):
        teacher_config(GPT2Config())
    config, _ = teacher_config(make_teacher("llama").config)
    part = make_teacher("llama").config
    part.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match="RoPE on whole heads"):
        teacher_config(part)
    with pytest.raises(ValueError, match="^to: expected one of"):
        student_config(config, "alibi")
    with pytest.raises(ValueError, match="to exchange RoPE for, got 'fox'"):
        student_config(config, "fox", keep_rope=True)
    with pytest.raises(ValueError, match="expected a RoPE model, got transport 'householder'"):
        teacher_config(student_config(config, "path"))
    with pytest.raises(ValueError, match="can't be loaded"):
        load_teacher(tmp_path / "nowhere")


def test_a_gguf_tokenizer_gets_the_special_tokens_of_its_model(monkeypatch, corpora) -> None:
    """What transformers 5.17 makes of a GGUF file: its end of text is its beginning."""
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig

    tokenizer = corpora[0].tokenizer()
    first, other = tokenizer.convert_ids_to_tokens([0, 1])
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = first, first, None
    asked = []

    def config(*where, **more):
        asked.append((*where, more))
        return LlamaConfig(bos_token_id=0, eos_token_id=1, pad_token_id=None)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *where, **more: tokenizer)
    monkeypatch.setattr(AutoConfig, "from_pretrained", config)
    assert load_teacher_tokenizer("models/small.gguf") is tokenizer
    assert asked == [("models", {"gguf_file": "small.gguf"})]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token) == (0, 1, None)
    assert tokenizer.eos_token == other
