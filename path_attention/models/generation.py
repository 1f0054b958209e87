"""`path-attention generate`: continue texts or answer chats with a model, as they are written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
import tyro
from transformers import TextStreamer

from path_attention.models.cache import CACHE_NAME, cache_bytes
from path_attention.models.loading import load_model_on, load_tokenizer
from path_attention.models.modeling import PathAttentionForCausalLM
from path_attention.models.prefix_store import PrefixStore
from path_attention.models.static_cache import StaticPathCache, steps_lack

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]
_BEFORE = 8  # tokens of a prompt that its answer is read with


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text. The text goes to stdout as it is written, speed and cache size to stderr.

    Without --prompt, --prompt-file or --prompts the prompt is read from stdin.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or of any transformers causal language model with its tokenizer."""
    prompt: str | None = None
    """The text to continue."""
    prompt_file: Path | None = None
    """A file with the text to continue, in UTF-8."""
    prompts: Path | None = None
    """A file of several prompts, one JSON value a line: a text, or a chat's list of messages
    {"role": …, "content": …}. They are taken one after the other, each with the same seed."""
    chat: bool = False
    """The prompt is a user's message: wrap it in the tokenizer's chat template."""
    system: str | None = None
    """With --chat: the message before the user's that says what the model is to do."""
    max_new_tokens: int = 256
    """The most tokens to write; the model may end the text before."""
    stop: tuple[str, ...] = ()
    """Stop once one of these texts was written."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token each time."""
    top_p: float = 0.95
    """Draw from the fewest tokens whose probabilities add up to this; 1 for all."""
    seed: int = 0
    """Of the draws."""
    draft: Path | None = None
    """Folder of a smaller model with the same tokenizer, which proposes tokens to be checked."""
    prefixes: Path | None = None
    """A folder of prompts' caches: what a prompt shares with an earlier one is not computed again.
    For models of this package; files of other weights are refused."""
    prefix_bytes: int = 2**33
    """The most bytes of caches in that folder; the least recently used go first."""
    graphs: Literal["auto", "yes", "no"] = "auto"
    """Whether steps are CUDA graphs of a cache of fixed size; auto: where model and device can, and
    neither drafts nor prefixes are asked for."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""

    def run(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._check()
        prompts = self._read_prompts()
        model = load_model_on(self.model, self.dtype, self.device)
        tokenizer = load_tokenizer(self.model, model)
        inputs = [encode_prompt(tokenizer, prompt).to(model.device) for prompt in prompts]
        options = self._options(tokenizer)
        if self.prefixes is not None:
            options["prefix_store"] = self._store(model)
        for ids in inputs:
            self._write(model, tokenizer, ids, options)
        if self.prefixes is not None:
            options["prefix_store"].save(self.prefixes)

    def _write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        streamer = _Watched(tokenizer, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
        if self._uses_graphs(model):
            config = cast(Any, model.config)
            room = ids.shape[1] + self.max_new_tokens
            options = {**options, CACHE_NAME: StaticPathCache(config, room, croppable=False)}
        torch.manual_seed(self.seed)
        start = time.perf_counter()
        generated = model.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_new_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
            **options,
        )
        _, (first, _), *later = streamer.given  # the prompt comes back at once
        line = f"{ids.shape[1]} tokens read in {first - start:.2f} s"
        line += f", {generated.sequences.shape[1] - ids.shape[1]} written"
        if later:
            line += f": {sum(n for _, n in later) / (later[-1][0] - first):.1f} tokens/s"
        cache = generated.get(CACHE_NAME)
        if isinstance(model, PathAttentionForCausalLM) and cache is not None:
            size = cache_bytes(cache)
            line += f"; cache of {cache.get_seq_length()} tokens: {size / 2**20:.1f} MiB"
        print(line, file=sys.stderr)

    def _uses_graphs(self, model: PreTrainedModel) -> bool:
        """Whether steps are graphs. Raises ValueError where that was asked for and cannot be."""
        lacks = f"a model of this package, got {type(model).__name__}"
        if isinstance(model, PathAttentionForCausalLM):
            lacks = steps_lack(model)
        for name in ("draft", "prefixes"):
            if getattr(self, name) is not None:
                lacks = f"no {name}, got one"
        if self.graphs == "yes" and lacks is not None:
            raise ValueError(f"graphs: expected {lacks}")
        return self.graphs != "no" and lacks is None

    def _options(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """What `generate` is told besides the prompt."""
        options: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            options = {"do_sample": True, "temperature": self.temperature}
            options |= {"top_p": self.top_p, "top_k": 0}
        if self.stop:
            options |= {"stop_strings": list(self.stop), "tokenizer": tokenizer}
        if self.draft is not None:
            options["assistant_model"] = load_model_on(self.draft, self.dtype, self.device)
        return options

    def _store(self, model: PreTrainedModel) -> PrefixStore:
        if not isinstance(model, PathAttentionForCausalLM):
            raise ValueError(
                f"prefixes: expected a model of this package, got {type(model).__name__}"
            )
        store = PrefixStore(model, max_bytes=self.prefix_bytes)
        if self.prefixes is not None and self.prefixes.exists():
            store.load(self.prefixes)
        return store

    def _check(self) -> None:
        given = [self.prompt, self.prompt_file, self.prompts]
        if sum(x is not None for x in given) > 1:
            raise ValueError("prompt: expected one of --prompt, --prompt-file, --prompts, got more")
        if self.draft is not None and self.prefixes is not None:
            raise ValueError("draft: expected none with --prefixes, got one")
        if self.system is not None and not self.chat:
            raise ValueError("system: expected with --chat only")
        if any(not text for text in self.stop):
            raise ValueError("stop: expected texts, got an empty one")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a value in (0, 1], got {self.top_p}")
        if self.prefix_bytes < 0:
            raise ValueError(f"prefix_bytes: expected at least 0, got {self.prefix_bytes}")

    def _read_prompts(self) -> list[Prompt]:
        if self.prompts is not None:
            prompts = read_prompts(self.prompts)
        elif self.prompt is not None:
            prompts = [self.prompt]
        elif self.prompt_file is not None:
            prompts = [self.prompt_file.read_text(encoding="utf-8")]
        elif sys.stdin is None or sys.stdin.isatty():
            raise ValueError(
                "prompt: expected --prompt, --prompt-file, --prompts or text on stdin, got none"
            )
        else:
            prompts = [sys.stdin.read()]
        return [self._as_chat(x) if self.chat and isinstance(x, str) else x for x in prompts]

    def _as_chat(self, prompt: str) -> list[dict[str, str]]:
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": prompt}]


class _Watched(TextStreamer):
    """Notes when it is given tokens, and how many: the prompt, then each part of the answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append((time.perf_counter(), value.numel()))
        super().put(value)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file of one JSON value a line: a text, or a chat's messages.

    Raises ValueError naming the line that is neither.
    """
    prompts: list[Prompt] = []
    for n, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            value = None
        messages = isinstance(value, list) and all(
            isinstance(x, dict) and x.keys() == {"role", "content"} for x in value
        )
        if not (isinstance(value, str) or (messages and value)):
            raise ValueError(
                f"prompts: expected a JSON text or list of messages in line {n} of {path}, "
                f"got {line[:60]!r}"
            )
        prompts.append(value)
    if not prompts:
        raise ValueError(f"prompts: expected at least one line, {path} has none")
    return prompts


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> torch.Tensor:
    """Token ids `[1, T]` of a prompt, after the beginning token that training documents start with.

    A tokenizer without a beginning token adds none. A chat's messages go through the tokenizer's
    template, up to where the answer starts. Raises ValueError if no token comes out, or if there is
    no template.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])  # pyright: ignore[reportArgumentType]
    elif tokenizer.chat_template is None:
        raise ValueError("chat: expected a tokenizer with a chat template, got one without")
    else:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    if not ids:
        raise ValueError("prompt: expected at least one token, got an empty text")
    return torch.tensor([ids])


def decode_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]
) -> str:
    """The text of an answer's tokens, special ones left out, as it goes on with its prompt's.

    Read with the prompt's end before it: SentencePiece's tokenizers take the blank off a text's
    first token, and a program whose first line is indented by one less fails. Alone where both have
    bytes of one character.
    """
    before = prompt_end(tokenizer, prompt)
    head, whole, alone = (
        str(tokenizer.decode(ids, skip_special_tokens=True))
        for ids in (before, [*before, *answer], list(answer))
    )
    return whole[len(head) :] if whole.startswith(head) else alone


def prompt_end(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> list[int]:
    """The tokens before an answer that it is read with; none if they end inside a character."""
    before = list(prompt[-_BEFORE:])
    text = str(tokenizer.decode(before, skip_special_tokens=True))
    return [] if text.endswith("\N{REPLACEMENT CHARACTER}") else before
