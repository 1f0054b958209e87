"""Checkpoints of this library as `path_attn` models of flash-linear-attention, and back.

What differs there, and how it is kept:

- PaTH-FoX's log-gates are multiplied by D^-½ with the scores: `forget_scale` here.
- w is divided by sqrt(‖y‖² + 1e-6), here by max(‖y‖, 1e-6): the same but for tiny y.
- w is projected by rank 32 or in full, convolved over 3 tokens; heads are hidden_size / heads; no
  biases, no norms of queries and keys in a saved model. Anything else is refused.

Only configuration and parameter names were read there; nothing of it is needed or copied.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from path_attention.models import (
    PathAttentionConfig,
    PathAttentionForCausalLM,
    load_model,
    model_folder,
)

MODEL_TYPE = "path_attn"
_RANK, _WIDTH = 32, 3
_HEAD_SIZES = (16, 32, 64, 128)
# ours → theirs, by whole parts of names
_NAMES = (
    ("model.embed_tokens.", "model.embeddings."),
    (".attention_norm.", ".attn_norm."),
    (".attention.transport.w_proj.", ".attn.w_proj."),
    (".attention.transport.beta_proj.", ".attn.bt_proj."),
    (".attention.decay.forget_proj.", ".attn.g_proj."),
    (".attention.", ".attn."),
)
_TAPS = (".attention.transport.w_conv", ".attn.w_conv1d.weight")
_SAME = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "initializer_range",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def convert_folder(source: str | Path, out: str | Path) -> Path:
    """Write a model of one kind as one of the other, by the source's model_type; returns `out`,
    which appears when it is complete.

    Raises:
        ValueError: `out` is there already; a model of neither kind, or with something that the
            other kind lacks.
    """
    source, out = model_folder(source), Path(out)
    if out.exists():
        raise ValueError(f"out: expected a new folder, {out} is there")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    config = json.loads((source / "config.json").read_text())
    kind = config.get("model_type")
    if kind == MODEL_TYPE:
        whole: Any = PathAttentionForCausalLM(our_config(config))
        state = our_state(_read(source))
        whole = whole.to(state["model.norm.weight"].dtype)
        if config.get("tie_word_embeddings"):
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        whole.load_state_dict(state)
        whole.save_pretrained(partial)
    elif kind == PathAttentionConfig.model_type:
        model = load_model(source, dtype="auto")
        theirs = their_config(model.config)  # pyright: ignore
        _write(partial, theirs, their_state(model.state_dict(), tied=theirs["tie_word_embeddings"]))
    else:
        raise ValueError(
            f"MODEL: expected model_type {MODEL_TYPE!r} or {PathAttentionConfig.model_type!r}, "
            f"got {kind!r}"
        )
    for path in source.iterdir():
        if re.match(
            r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template)", path.name
        ):
            shutil.copy2(path, partial / path.name)
    os.rename(partial, out)
    return out


def our_config(theirs: dict[str, Any]) -> PathAttentionConfig:
    """From the content of their config.json. Raises ValueError on what this library lacks."""
    wanted = {
        "hidden_act": ("swish", "silu"),
        "use_w_shortconv": (True,),  # without it they leave out SiLU too
        "attnres_block_size": (None,),
        "elementwise_affine": (True, None),
    }
    defaults = {"hidden_act": "swish", "use_w_shortconv": True, "elementwise_affine": True}
    for name, known in wanted.items():
        value = theirs.get(name, defaults.get(name))
        if value not in known:
            raise ValueError(f"{name}: expected one of {list(known)}, got {value!r}")
    heads, width = theirs.get("num_heads", 32), theirs.get("hidden_size", 2048)
    inner = theirs.get("intermediate_size")
    if inner is None:  # their rule
        inner = -(-int(width * (theirs.get("hidden_ratio") or 4) * 2 / 3) // 256) * 256
    gated = bool(theirs.get("use_forget_gate"))
    return PathAttentionConfig(
        **{name: theirs[name] for name in _SAME if name in theirs},
        num_attention_heads=heads,
        num_key_value_heads=theirs.get("num_kv_heads") or heads,
        intermediate_size=inner,
        rms_norm_eps=theirs.get("norm_eps", 1e-6),
        transport="householder",
        decay="forget" if gated else "none",
        forget_scale=(width // heads) ** -0.5 if gated else 1.0,
        direction_rank=_RANK if theirs.get("use_low_rank_w", True) else None,
        direction_conv_size=_WIDTH,
    )


def their_config(ours: PathAttentionConfig) -> dict[str, Any]:
    """Their config.json. Raises ValueError, naming the field, on what they lack."""
    size = ours.hidden_size // ours.num_attention_heads
    gated = ours.decay == "forget"
    wanted: dict[str, tuple[Any, ...]] = {
        "transport": ("householder",),
        "decay": ("none", "forget"),
        "normalizer": ("softmax",),
        "head_dim": (size,) if size in _HEAD_SIZES else _HEAD_SIZES,
        "value_head_dim": (size,),
        "qk_norm": (False,),
        "output_norm": (False,),
        "qkv_bias": (False,),
        "output_bias": (False,),
        "attention_scale": (None, size**-0.5),
        "direction_rank": (_RANK, None),
        "direction_conv_size": (_WIDTH,),
        "householders_per_token": (1,),
        "beta_max": (2.0,),
        "nope_layers": (None, []),
    }
    if gated:
        wanted["forget_scale"] = (size**-0.5,)
    for name, known in wanted.items():
        value = getattr(ours, name)
        if value not in known:
            raise ValueError(
                f"{name}: expected one of {list(known)} for flash-linear-attention, got {value!r}"
            )
    return {
        "architectures": ["PaTHAttentionForCausalLM"],
        "model_type": MODEL_TYPE,
        **{name: getattr(ours, name) for name in _SAME},
        "num_heads": ours.num_attention_heads,
        "num_kv_heads": ours.num_key_value_heads,
        "hidden_ratio": None,
        "intermediate_size": ours.intermediate_size,
        "hidden_act": "swish",
        "norm_eps": ours.rms_norm_eps,
        "use_forget_gate": gated,
        "use_w_shortconv": True,
        "use_low_rank_w": ours.direction_rank is not None,
    }


def our_state(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights under our names. Raises ValueError on biases of a convolution."""
    state = {}
    for name, value in theirs.items():
        if name.endswith(".w_conv1d.bias"):
            raise ValueError(f"MODEL: expected convolutions without a bias, got {name}")
        if name.endswith(_TAPS[1]):
            name, value = name.replace(_TAPS[1], _TAPS[0]), value.squeeze(1)
        for here, there in _NAMES:
            name = name.replace(there, here)
        state[name] = value
    return state


def their_state(ours: dict[str, Tensor], *, tied: bool = False) -> dict[str, Tensor]:
    """Our weights under their names; without the head that is tied to the embedding."""
    state = {}
    for name, value in ours.items():
        if tied and name == "lm_head.weight":
            continue
        if name.endswith(_TAPS[0]):
            name, value = name.replace(_TAPS[0], _TAPS[1]), value.unsqueeze(1)
        for here, there in _NAMES:
            name = name.replace(here, there)
        state[name] = value.contiguous()
    return state


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    if not state:
        raise ValueError(f"MODEL: expected safetensors in {folder}, got none")
    return state


def _write(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config["dtype"] = str(state["model.norm.weight"].dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
