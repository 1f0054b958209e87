"""RoPE models of transformers as models of this library: the same weights, the same logits.

Llama, Mistral, Qwen2, Qwen3, SmolLM (which is Llama) and SmolLM3, and this library's own RoPE
models. The teacher of a conversion is such a model too, so packing and kernels are the student's.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
TARGETS = ("path", "path_fox", "fox", "rope")
_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_RENAMED = (
    (r"^model\.layers\.(\d+)\.input_layernorm\.", r"model.layers.\1.attention_norm."),
    (r"^model\.layers\.(\d+)\.post_attention_layernorm\.", r"model.layers.\1.mlp_norm."),
    (r"^model\.layers\.(\d+)\.self_attn\.", r"model.layers.\1.attention."),
)


@dataclass(frozen=True)
class Teacher:
    """A RoPE model, of this library's classes, in evaluation mode.

    Attributes:
        model: transport "rotary".
        window: the longest context that its frequencies hold for, where scaled RoPE changes them
            beyond; None where they hold for any.
        name: where it came from.
    """

    model: PathAttentionForCausalLM
    window: int | None
    name: str

    def check_length(self, length: int) -> None:
        """Raise ValueError on a context that the teacher would have other frequencies for."""
        check_length(self.name, self.window, length)


def check_length(name: str, window: int | None, length: int) -> None:
    """Raise ValueError if `length` is beyond `window` (`Teacher.window`)."""
    if window is not None and length > window:
        raise ValueError(
            f"context_length: expected at most {window} tokens, beyond which the RoPE of {name} "
            f"changes with the length, got {length}"
        )


def load_teacher_config(source: str | Path) -> tuple[PathAttentionConfig, int | None]:
    """`teacher_config` of a model that is not loaded: of the hub, a folder, a GGUF file, a run.

    Raises ValueError where `teacher_config` does, or if there is no such model.
    """
    from transformers import AutoConfig, GenerationConfig

    where, more = _locate(source)
    try:
        config = AutoConfig.from_pretrained(where, **more)
    except OSError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"MODEL: {str(source)!r} can't be loaded: {reason}") from error
    try:
        generation = None if more else GenerationConfig.from_pretrained(where)
    except OSError:  # a model needs none
        generation = None
    return teacher_config(_with_ends(config, generation))


def load_teacher(source: str | Path, dtype: torch.dtype = torch.float32) -> Teacher:
    """A pretrained model of the hub, a folder, a GGUF file, or a run of this library.

    Raises ValueError where `teacher_config` does, or if there is no such model.
    """
    return as_teacher(load_pretrained(source, dtype), str(source))


def as_teacher(model: PreTrainedModel, name: str = "the model") -> Teacher:
    """A loaded transformers model as a `Teacher`; its weights are shared where they can be.

    Scaled RoPE multiplies queries and keys by a factor, which `attention_scale` has for all layers:
    keys of layers without RoPE are divided by its square.

    Raises ValueError where `teacher_config` does.
    """
    config, window = teacher_config(
        _with_ends(cast(Any, model.config), getattr(model, "generation_config", None))
    )
    if isinstance(model, PathAttentionForCausalLM):
        return Teacher(model.eval(), window, name)
    with torch.device("meta"):
        ours = cast(Any, PathAttentionForCausalLM(config))
    state = renamed(model.state_dict())
    if config.attention_scale is not None:
        _unscale_keys(state, config)
    ours.load_state_dict(state, assign=True, strict=True)
    ours.tie_weights()
    return Teacher(ours.eval(), window, name)


def load_pretrained(source: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """`from_pretrained` on a name of the hub, a folder, a run's folder, or a .gguf file."""
    from transformers import AutoModelForCausalLM

    import path_attention.models  # noqa: F401

    options: dict[str, Any] = {"dtype": dtype}
    where, more = _locate(source)
    if more:
        from transformers import GgufConfig  # pyright: ignore[reportAttributeAccessIssue]

        options["quantization_config"] = GgufConfig(dequantize=True)
    try:
        return AutoModelForCausalLM.from_pretrained(where, **options, **more)
    except OSError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"MODEL: {str(source)!r} can't be loaded: {reason}") from error


def load_teacher_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a model. Raises ValueError if there is none."""
    from transformers import AutoConfig, AutoTokenizer

    where, more = _locate(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **more)
        if more:
            name_special_tokens(tokenizer, AutoConfig.from_pretrained(where, **more))
        return tokenizer
    except Exception as error:  # hub, file and parser errors alike
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"MODEL: {str(source)!r} has no tokenizer: {reason}") from error


def name_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Give a tokenizer the begin, end and padding that its model's configuration has.

    transformers 5.17 takes a GGUF file's beginning of text for its end, and no padding.
    """
    for kind in ("bos_token", "eos_token", "pad_token"):
        number = getattr(config, f"{kind}_id", None)
        if isinstance(number, int):
            setattr(tokenizer, kind, tokenizer.convert_ids_to_tokens(number))


def _locate(source: str | Path) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` takes for a source, and its further arguments."""
    path = Path(source)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if (path / "model" / "config.json").is_file():
        return str(path / "model"), {}
    return str(source), {}


def _with_ends(config: PreTrainedConfig, generation: GenerationConfig | None) -> PreTrainedConfig:
    """The configuration with the end tokens that the model generates by: a chat model's end of a
    turn is named there alone, as Llama 3's."""
    ends: Any = None if generation is None else generation.eos_token_id
    if ends is None:
        return config
    config = copy.copy(config)
    config.eos_token_id = ends
    return config


def teacher_config(config: PreTrainedConfig) -> tuple[PathAttentionConfig, int | None]:
    """This library's RoPE configuration of a transformers configuration, and `Teacher.window`.

    Raises:
        ValueError: an architecture that it does not know; sliding windows; another activation than
            SiLU; biases in the MLP; a RoPE of parts of a head.
    """
    if isinstance(config, PathAttentionConfig):
        if config.transport != "rotary" or config.decay != "none":
            raise ValueError(
                f"MODEL: expected a RoPE model, got transport {config.transport!r} with decay "
                f"{config.decay!r}"
            )
        return config, None
    family = config.model_type
    if family not in FAMILIES:
        raise ValueError(f"MODEL: expected one of the families {list(FAMILIES)}, got {family!r}")
    _check_known(config)
    frequencies, factor, window = _frequencies(config)
    fields = {name: getattr(config, name) for name in _COPIED if hasattr(config, name)}
    head = fields.get("head_dim") or config.hidden_size // config.num_attention_heads
    biased = bool(getattr(config, "attention_bias", False))
    layers = getattr(config, "no_rope_layers", None) or ()
    nope = [n for n, turns in enumerate(layers[: config.num_hidden_layers]) if not turns]
    fields |= {
        "head_dim": head,
        "qk_norm": family == "qwen3",
        "qkv_bias": biased or family == "qwen2",
        "output_bias": biased,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "rope_frequencies": frequencies,
        "nope_layers": nope or None,
    }
    if factor != 1.0:  # of queries and keys
        fields["attention_scale"] = head**-0.5 * factor**2
    return PathAttentionConfig.from_preset("rope", **fields), window


def _check_known(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type != "mistral" and not getattr(config, "use_sliding_window", False):
        window = None
    if window is not None or kinds != {"full_attention"}:
        raise ValueError(
            "MODEL: expected full attention in every layer, got sliding windows "
            f"(sliding_window = {window}, layer types {sorted(kinds)})"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"MODEL: expected the activation 'silu', got {config.hidden_act!r}")
    if getattr(config, "mlp_bias", False):
        raise ValueError("MODEL: expected an MLP without biases, got mlp_bias = True")
    part = config.rope_parameters.get("partial_rotary_factor") or 1.0
    if part != 1.0:
        raise ValueError(f"MODEL: expected RoPE on whole heads, got partial_rotary_factor = {part}")


def _frequencies(config: Any) -> tuple[list[float], float, int | None]:
    """The angle a step of each pair, the factor on queries and on keys, and `Teacher.window`.

    transformers' own numbers, in float32, for a context within the window.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    window = None
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return (1.0 / parameters["rope_theta"] ** exponents).tolist(), 1.0, None
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"MODEL: expected one of the RoPE kinds {sorted(ROPE_INIT_FUNCTIONS)}, got {kind!r}"
        )
    if kind == "dynamic":
        window = config.max_position_embeddings
    elif kind == "longrope":
        window = parameters["original_max_position_embeddings"]
    found, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return found.tolist(), float(factor), window


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A transformers model's weights under this library's names."""
    out = {}
    for name, value in state.items():
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        out[name] = value
    return out


def _unscale_keys(state: dict[str, Tensor], config: PathAttentionConfig) -> None:
    """Divide keys of layers without RoPE by what RoPE multiplies scores by, in place."""
    factor = cast(float, config.attention_scale) * cast(int, config.head_dim) ** 0.5
    for layer in config.nope_layers or ():
        for kind in ("weight", "bias"):
            name = f"model.layers.{layer}.attention.k_proj.{kind}"
            if name in state:
                state[name] = state[name] / factor


def student_config(
    teacher: PathAttentionConfig, to: str, *, keep_rope: bool = False, **overrides: Any
) -> PathAttentionConfig:
    """A teacher's configuration with another encoding.

    Args:
        teacher: with transport "rotary".
        to: "path", "path_fox", "fox", or "rope" for the teacher's own.
        keep_rope: with a preset of PaTH: RoPE by a share of its angles too, for an exchange
            ("rotary_householder").
        overrides: other fields, such as direction_rank.

    Raises:
        ValueError: an unknown target, or nothing to keep RoPE beside.
    """
    if to not in TARGETS:
        raise ValueError(f"to: expected one of {list(TARGETS)}, got {to!r}")
    config = copy.deepcopy(teacher)
    fields = {**PRESETS[to], **overrides}
    if to != "rope" and not keep_rope:
        fields["nope_layers"] = None
    if keep_rope:
        if fields["transport"] != "householder":
            raise ValueError(f"to: expected 'path' or 'path_fox' to exchange RoPE for, got {to!r}")
        fields["transport"] = "rotary_householder"
    elif to != "rope":
        fields["rope_frequencies"] = None
    for name, value in fields.items():
        if not hasattr(config, name):
            raise ValueError(f"overrides: expected fields of PathAttentionConfig, got {name!r}")
        setattr(config, name, value)
    config.complete()
    return config


def copy_model(
    model: PathAttentionForCausalLM, config: PathAttentionConfig, seed: int = 0
) -> PathAttentionForCausalLM:
    """A float32 model by `config` with every weight of `model` that it has a place for.

    What is new starts as in training (`PathAttentionConfig`), drawn by `seed`.

    Raises ValueError if a weight of `model` has no place, but those of its encoding.
    """
    torch.manual_seed(seed)
    student = cast(nn.Module, PathAttentionForCausalLM(config)).float()
    state = {name: value.float() for name, value in model.state_dict().items()}
    report = student.load_state_dict(state, strict=False)
    lost = [name for name in report.unexpected_keys if not is_encoding(name)]
    missing = [name for name in report.missing_keys if not is_encoding(name)]
    if lost or missing:
        raise ValueError(f"config: expected the model's weights, got {[*lost, *missing][:3]}")
    return cast(PathAttentionForCausalLM, student)


def is_encoding(name: str) -> bool:
    """Whether a parameter's name is that of an encoding: w, β or a gate."""
    return re.search(r"\.attention\.(transport|decay)\.", name) is not None


def is_attention(name: str) -> bool:
    """Whether a parameter's name is one of an attention layer, its encoding included."""
    return ".attention." in name
