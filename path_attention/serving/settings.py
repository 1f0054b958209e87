"""What a server allows: sizes, numbers, times."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of an engine and of its API.

    Raises ValueError naming the field that makes no sense.
    """

    model_name: str = "path-attention"
    """What the API calls the model."""
    api_key: str | None = None
    """What clients must show; None lets everyone in."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, without ports, that requests may have in their Host header, beside localhost,
    127.0.0.1 and [::1]; * for any. None: any too, where the server listens beyond loopback."""
    cors_origins: tuple[str, ...] = ()
    """Origins, such as https://example.org, whose pages may ask in a browser; * for any."""
    max_prompt_tokens: int = 32768
    """The longest prompt."""
    max_output_tokens: int = 4096
    """The most tokens that a request may ask for, and what one gets that doesn't say."""
    max_rows: int = 32
    """Answers that are written at once."""
    max_queue: int = 256
    """Requests that wait; one more is refused with 429."""
    max_body_bytes: int = 2**20
    """Of a request."""
    max_header_bytes: int = 2**14
    """Of a request's head: its path and all headers."""
    max_connections: int = 512
    """Open at once; one more is closed."""
    client_seconds: float = 30.0
    """In which a client must have sent a request's head, then its body; and in which it must have
    read some of what waits for it."""
    request_seconds: float = 600.0
    """From a request's arrival to its last token."""
    cache_bytes: int = 0
    """The most that the caches of running requests may come to; others wait. 0 is half of what is
    free on a GPU, and 4 GiB on a CPU."""
    prefix_bytes: int = 2**30
    """The most that kept prefixes may take beside them; 0 keeps none."""
    prefill_tokens: int = 0
    """Tokens of prompts that are computed between two steps of decoding. 0 is 8192 on a GPU, and
    512 on a CPU."""
    lookup_tokens: int = 0
    """Tokens that are proposed at once from the text so far; 0 for none."""
    draft_tokens: int = 4
    """Tokens that a draft model proposes at once."""
    graphs: bool = True
    """On an NVIDIA GPU, where nothing is proposed: decode in rows of fixed size by CUDA graphs."""

    def __post_init__(self) -> None:
        zero = ("max_queue", "cache_bytes", "prefix_bytes", "prefill_tokens", "lookup_tokens")
        least: dict[str, float] = dict.fromkeys((*zero, "graphs"), 0)
        least["client_seconds"] = 0.1
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value >= least.get(field.name, 1):
                raise ValueError(
                    f"{field.name}: expected at least {least.get(field.name, 1)}, got {value}"
                )
        for name in ("lookup_tokens", "draft_tokens"):
            if getattr(self, name) > 32:  # a cache takes its last 64 tokens back, whatever it holds
                raise ValueError(f"{name}: expected at most 32, got {getattr(self, name)}")
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key: expected a text, got an empty one")
        for name in self.allowed_hosts:
            if name != "*" and not re.fullmatch(r"\[[0-9a-fA-F:.]+\]|[\w.-]+", name):
                raise ValueError(f"allowed_hosts: expected names without ports, got {name!r}")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
                raise ValueError(f"cors_origins: expected scheme://host[:port], got {origin!r}")
