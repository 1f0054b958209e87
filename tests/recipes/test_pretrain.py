"""The pretraining recipes say what was published, for every preset, and refuse unknown names."""

from __future__ import annotations

import pytest
import torch

from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM
from path_attention.recipes import RECIPES, pretrain
from path_attention.recipes.pretrain import SIZES

VOCABULARY = 32000


def counted(size: str, preset: str) -> int:
    """Parameters of the recipe's model, made where it takes no memory."""
    model = pretrain(size, preset).model
    config = PathAttentionConfig.from_preset(preset, vocab_size=VOCABULARY, **model.overrides())
    with torch.device("meta"):
        return sum(p.numel() for p in PathAttentionForCausalLM(config).parameters())


def expected(size: str, preset: str) -> int:
    """The same by hand."""
    s = SIZES[size]
    layer = 4 * s.width**2 + 3 * s.width * s.mlp + 2 * s.width
    if preset in ("path", "path_fox", "path_alibi"):
        layer += 2 * 32 * s.width + 3 * s.width + (s.width + 1) * s.heads
    if preset in ("fox", "path_fox"):
        layer += (s.width + 1) * s.heads
    return 2 * VOCABULARY * s.width + s.layers * layer + s.width


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("preset", ["rope", "alibi", "fox", "path", "path_fox", "path_alibi"])
def test_models_have_the_parameters_of_their_shape(size: str, preset: str) -> None:
    assert counted(size, preset) == expected(size, preset)


def test_sizes_are_what_their_names_say() -> None:
    counts = {size: counted(size, "rope") for size in SIZES}
    assert counts == {"125m": 134_105_856, "350m": 373_867_520, "760m": 777_856_512}


def test_every_preset_has_every_size() -> None:
    for size in SIZES:
        for preset in PRESETS:
            recipe = RECIPES[f"pretrain_{size}_{preset}"]()
            assert (recipe.model.preset, recipe.name) == (preset, f"pretrain_{size}_{preset}")
            for processes in (1, 2, 4, 8):
                assert recipe.passes(processes) * processes * recipe.row_tokens == (
                    recipe.batch_tokens
                )


def test_the_published_recipe() -> None:
    recipe = pretrain("760m", "path_fox")
    assert recipe.batch_tokens == 2**21 and recipe.data.context_length == 4096
    assert recipe.steps * recipe.batch_tokens == pytest.approx(50e9, rel=1e-4)
    warmup = recipe.schedule.warmup(recipe.batch_tokens)
    assert warmup * recipe.batch_tokens == pytest.approx(1e9, rel=1e-3)
    assert recipe.rate(0) == pytest.approx(3e-5, rel=0.1)
    assert recipe.rate(warmup - 1) == pytest.approx(1e-3)
    assert recipe.rate(recipe.steps - 1) == pytest.approx(3e-5)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.clip) == (0.01, 1.0)
    assert recipe.model.initializer_range == 0.02
    assert recipe.data.build.tokenizer == "mistralai/Mistral-7B-v0.1"
    assert recipe.data.build.sources == ("hub:HuggingFaceFW/fineweb-edu",)
    assert pretrain("760m", "rope").model.options == {"rope_theta": 500_000.0}


def test_encodings_differ_in_the_encoding_alone() -> None:
    one, other = (pretrain("350m", preset).course() for preset in ("path", "fox"))
    assert {key for key in one if one[key] != other[key]} == {"model.preset"}


def test_tokens_and_batch_set_the_steps() -> None:
    recipe = pretrain("125m", "path", tokens=1 << 24, batch_tokens=1 << 17, seed=3)
    assert (recipe.steps, recipe.seed, recipe.row_tokens) == (128, 3, 1 << 15)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"size": "7b"}, "size: expected one of"),
        ({"preset": "pth"}, "preset: expected one of"),
        ({"learnin_rate": 1.0}, r"fields: expected fields of Recipe, got \['learnin_rate'\]"),
    ],
)
def test_unknown_names_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pretrain(**call)
