"""`path-attention serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from path_attention.models.loading import load_model_on, load_tokenizer
from path_attention.models.modeling import PathAttentionForCausalLM
from path_attention.models.static_cache import steps_lack
from path_attention.serving.batched import BatchedEngine
from path_attention.serving.engine import Engine, log
from path_attention.serving.fallback import GenerateEngine
from path_attention.serving.settings import Settings
from path_attention.serving.slots import SlotEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO = Path("runs/demo/seed0/path")
KEY = "PATH_ATTENTION_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model's chats and completions over HTTP, as OpenAI's clients ask for them.

    A model of this package decodes many answers together and shares prefixes; any other one of
    transformers is served through `generate`, one answer at a time, and says so. The key that
    clients must show is read from PATH_ATTENTION_API_KEY too. Ends on SIGINT or SIGTERM once
    running answers are written.
    """

    model: Annotated[Path, tyro.conf.Positional] = DEMO
    """Folder of a finished run, or of any transformers causal language model with its tokenizer."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all: then set a key."""
    port: int = 8000
    """Port to listen at; 0 for any that is free."""
    draft: Path | None = None
    """Folder of a smaller model of this package with the same tokens, which proposes tokens."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of weights and activations."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)

    def run(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        from path_attention.serving.server import is_loopback, make_server

        disable_progress_bar()
        logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
        if self.model == DEMO and not DEMO.exists():
            raise ValueError(f"model: expected a folder, or {DEMO}, which `make demo` trains")
        settings, key = self.settings, os.environ.get(KEY)
        if settings.api_key is None and key:
            settings = replace(settings, api_key=key)
        model, draft = load_model_on(self.model, self.dtype, self.device), None
        if self.draft is not None:
            draft = load_model_on(self.draft, self.dtype, self.device)
        engine = make_engine(model, load_tokenizer(self.model, model), settings, draft)
        if settings.api_key is None and not is_loopback(self.host):
            log.warning("%s: whoever reaches this machine may ask; no key was set", self.host)
        with suppress(KeyboardInterrupt):  # uvicorn ends in order, then raises it again
            make_server(engine, settings, host=self.host, port=self.port).run()


def make_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    draft: PreTrainedModel | None = None,
) -> Engine:
    """The engine for a model. Raises ValueError on drafts for, or by, one of another library."""
    if not isinstance(model, PathAttentionForCausalLM):
        if draft is not None or settings.lookup_tokens:
            raise ValueError(
                f"draft: expected none for a model served through generate, {type(model).__name__}"
            )
        return GenerateEngine(model, tokenizer, settings)
    if draft is not None and not isinstance(draft, PathAttentionForCausalLM):
        raise ValueError(f"draft: expected a model of this package, got {type(draft).__name__}")
    plain = draft is None and not settings.lookup_tokens
    if settings.graphs and plain and steps_lack(model) is None:
        return SlotEngine(model, tokenizer, settings)
    return BatchedEngine(model, tokenizer, settings, draft)
