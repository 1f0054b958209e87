"""A tiny model, a byte-level tokenizer, requests, and a real server in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.serving.engine import Engine
from path_attention.serving.request import Piece, Refused, Request, Sampling

GREEDY = Sampling(temperature=0)


def make_tokenizer() -> Any:
    """Bytes, one token each, behind two special ones; no chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate(["<|end|>", "<|pad|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|pad|>"
    )


def make_model(
    preset: str = "path", *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any
) -> PathAttentionForCausalLM:
    """Random weights far from ties; the end of a text is never the likeliest token."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
    sizes = {"vocab_size": 258, **sizes}
    config = PathAttentionConfig.from_preset(
        preset, direction_rank=8, qk_norm=True, initializer_range=0.2, **sizes
    )
    model = PathAttentionForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        model.lm_head.weight[:2] = 0
    return model


class Asked:
    """A request that was submitted, and its pieces."""

    def __init__(self, engine: Engine, prompt: list[int], max_tokens: int = 12, **more: Any):
        self.came: queue.Queue[Piece | Refused] = queue.Queue()
        more.setdefault("sampling", GREEDY)
        request = Request(prompt=prompt, max_tokens=max_tokens, deliver=self.came.put, **more)
        self.choices = request.choices
        self.ticket = engine.submit(request)

    def wait(self) -> list[Piece]:
        """Every piece."""
        pieces: list[Piece] = []
        while sum(piece.finish is not None for piece in pieces) < self.choices:
            piece = self.came.get(timeout=60)
            if isinstance(piece, Refused):
                raise piece
            pieces.append(piece)
        return pieces

    def ids(self) -> list[int]:
        """Tokens of the only choice."""
        return list(self.wait()[-1].token_ids)

    def text(self) -> str:
        return "".join(piece.text for piece in self.wait())


def make_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (length,), generator=generator).tolist()


def gauge(engine: Engine, name: str, **labels: str) -> float:
    value = engine.metrics.registry.get_sample_value(f"path_attention_{name}", labels)
    return 0.0 if value is None else value


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)


@contextmanager
def serve(engine: Engine, **settings: Any) -> Iterator[str]:
    """A real server of an engine on a free port; yields its address."""
    from path_attention.serving.server import make_server

    engine.settings = settings = replace(engine.settings, **settings)
    server = make_server(engine, settings, port=0, log_level="warning")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
