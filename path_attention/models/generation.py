"""`path-attention generate`: continue a text with a trained model, as it is written."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro

from path_attention.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text. The text goes to stdout as it is written, the speed to stderr.

    Without --prompt or --prompt-file the prompt is read from stdin.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished run, or of any transformers causal language model with its tokenizer."""
    prompt: str | None = None
    """The text to continue."""
    prompt_file: Path | None = None
    """A file with the text to continue, in UTF-8."""
    max_new_tokens: int = 256
    """The most tokens to write; the model may end the text before."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token each time."""
    top_p: float = 0.95
    """Draw from the fewest tokens whose probabilities add up to this; 1 for all."""
    seed: int = 0
    """Of the draws."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""

    def run(self) -> None:
        from transformers import TextStreamer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._check()
        prompt = self._read_prompt()
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(self.model, dtype=getattr(torch, self.dtype)).to(device)  # pyright: ignore[reportArgumentType]
        tokenizer = load_tokenizer(self.model, model)
        ids = encode_prompt(tokenizer, prompt).to(device)
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
        drawing: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            drawing = {
                "do_sample": True,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": 0,
            }
        torch.manual_seed(self.seed)
        start = time.perf_counter()
        generated = model.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_new_tokens,
            streamer=streamer,
            **drawing,
        )
        seconds = time.perf_counter() - start
        tokens = generated.shape[1] - ids.shape[1]
        print(
            f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s", file=sys.stderr
        )

    def _check(self) -> None:
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("prompt: expected --prompt or --prompt-file, got both")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a value in (0, 1], got {self.top_p}")

    def _read_prompt(self) -> str:
        if self.prompt is not None:
            return self.prompt
        if self.prompt_file is not None:
            return self.prompt_file.read_text(encoding="utf-8")
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("prompt: expected --prompt, --prompt-file or text on stdin, got none")
        return sys.stdin.read()


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """Token ids `[1, T]` of a prompt, after the beginning token that training documents start with.

    A tokenizer without a beginning token adds none. Raises ValueError if no token comes out.
    """
    ids = list(tokenizer(prompt)["input_ids"])  # pyright: ignore[reportArgumentType]
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    if not ids:
        raise ValueError("prompt: expected at least one token, got an empty text")
    return torch.tensor([ids])
