"""What tests of the server share: one model, engines of it, one server and a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from small_server import make_model, make_tokenizer, serve

from path_attention.models import PathAttentionForCausalLM
from path_attention.serving.command import make_engine
from path_attention.serving.engine import Engine
from path_attention.serving.settings import Settings


@pytest.fixture(scope="session")
def model() -> PathAttentionForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def make(model, tokenizer) -> Iterator[Callable[..., Engine]]:
    """make(model=…, draft=…, **settings): an engine that runs, and is stopped at the end."""
    engines = []

    def start(model_: Any = model, draft: Any = None, **settings: Any) -> Engine:
        engine = make_engine(model_, tokenizer, Settings(**settings), draft)
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.stop(0)


@pytest.fixture(scope="session")
def server(model, tokenizer) -> Iterator[tuple[str, Engine]]:
    """(address, engine) of one server that many tests use."""
    engine = make_engine(model, tokenizer, Settings(max_output_tokens=2000, max_body_bytes=2**16))
    with serve(engine) as address:
        yield address, engine


@pytest.fixture
def client(server) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client
