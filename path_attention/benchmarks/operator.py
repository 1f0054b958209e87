"""The command `path-attention benchmark operator`: time and peak memory beside plain attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.benchmarks.candidates import ENCODINGS, Candidate, Inputs, candidates
from path_attention.benchmarks.measure import (
    Job,
    peak_bytes,
    relative_error,
    show_time,
    summarise,
    time_interleaved,
)
from path_attention.ops.path import path_attention
from path_attention.results import make_result, write_result

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Relative error that one of ours may have: about six roundings of a 16-bit result.
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1.3e-3}
_CHECKED_TOKENS = 200


@dataclass(frozen=True, kw_only=True)
class BenchmarkOperator:
    """Time and peak memory of the attention operator beside plain attention and peers.

    Writes OUT.json and OUT.png and prints the table. Candidates take turns; ratios are to the
    anchor (plain attention without position encoding) in the same turn. Refused unless each of our
    implementations agrees with the definition on this machine first.
    """

    tokens: str = "2048,8192"
    """Sequence lengths, with commas between."""
    memory_tokens: str = ""
    """Further lengths, at which peak memory alone is measured."""
    batch_tokens: int = 0
    """Tokens a batch: as many sequences as fit, at least one. 0 is one sequence."""
    heads: int = 8
    """Query heads."""
    key_heads: int = 0
    """Key/value heads; 0 is as many as query heads."""
    size: int = 64
    """Head size of queries, keys and values."""
    encodings: str = "path,path_fox,fox"
    """Of path, path_fox, fox, nope, with commas between; the anchors are always nope."""
    candidates: str = ""
    """Names with commas between; empty for all that run here."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of q, k, v; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    repeats: int = 5
    """Turns that count."""
    threads: int = 0
    """Threads on the CPU; 0 is torch's own choice."""
    out: Path = Path("results/operator")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import draw, print_table

        device = _device(self.device)
        if self.threads > 0:
            torch.set_num_threads(self.threads)
        result = make_result(
            what="Milliseconds and peak MiB above the inputs of attention's forward and backward, "
            "and time as a ratio to plain attention's (the first candidate) in the same turn",
            rows=self.measure(device, lambda line: print(line, flush=True)),
            device=str(device),
        )
        write_result(self.out.with_suffix(".json"), result)
        draw(result, self.out.with_suffix(".png"))
        print_table(result)

    def measure(self, device: torch.device, report: Callable[[str], None]) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options or a wrong operator."""
        tokens, chosen = _numbers("tokens", self.tokens), self._chosen(device)
        memory_tokens = _numbers("memory_tokens", self.memory_tokens) if self.memory_tokens else []
        lowest = {
            "heads": 1,
            "size": 1,
            "repeats": 1,
            "key_heads": 0,
            "batch_tokens": 0,
            "threads": 0,
        }
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        errors = self._check(chosen, device, dtype)
        report("the operator agrees with its definition")
        rows = []
        for T in sorted({*tokens, *memory_tokens}):
            B = max(1, self.batch_tokens // T)
            inputs = make_inputs(B, T, self.heads, self._key_heads, self.size, dtype, device)
            jobs = [_job(candidate, inputs, encoding) for candidate, encoding in chosen]
            times = time_interleaved(jobs, self.repeats) if T in tokens else [None] * len(jobs)
            for (candidate, encoding), job, taken in zip(chosen, jobs, times, strict=True):
                row = {
                    "candidate": candidate.name,
                    "encoding": encoding,
                    "tokens": T,
                    "batch": B,
                    "heads": self.heads,
                    "key_heads": self._key_heads,
                    "size": self.size,
                    "dtype": str(dtype).removeprefix("torch."),
                    "threads": torch.get_num_threads() if device.type == "cpu" else None,
                    "repeats": self.repeats,
                    **summarise(taken, times[0]),
                    "peak_mib": round(peak_bytes(job) / 2**20, 2),
                    "error": float(f"{errors[candidate.name, encoding]:.2g}"),
                }
                rows.append(row)
                report(f"T {T}: {candidate.name} {encoding}: {show_time(row, 'both')}")
        return rows

    @property
    def _key_heads(self) -> int:
        return self.key_heads or self.heads

    def _chosen(self, device: torch.device) -> list[tuple[Candidate, str]]:
        """Candidates with their encodings, the anchor first."""
        encodings = _words("encodings", self.encodings, ENCODINGS)
        available = candidates(device.type)
        names = [c.name for c in available]
        wanted = _words("candidates", self.candidates, names) if self.candidates else names
        chosen = [(available[0], "nope")]
        for candidate in available[1:]:
            if candidate.name in wanted:
                own = [e for e in encodings if e in candidate.encodings]
                plain = candidate.encodings == ("nope",)
                chosen += [(candidate, e) for e in (["nope"] if plain else own)]
        return chosen

    def _check(
        self, chosen: Sequence[tuple[Candidate, str]], device: torch.device, dtype: torch.dtype
    ) -> dict[tuple[str, str], float]:
        """Relative error of each candidate; ValueError if one of ours is beyond what is allowed."""
        inputs = make_inputs(
            2, _CHECKED_TOKENS, self.heads, self._key_heads, self.size, dtype, device
        )
        wide = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
        errors = {}
        for candidate, encoding in chosen:
            exact = _job(_DEFINITION, wide, encoding)
            error = relative_error(_job(candidate, inputs, encoding), exact)
            if candidate.ours and not error <= _ALLOWED[dtype]:
                raise ValueError(
                    f"{candidate.name}: expected a relative error of at most {_ALLOWED[dtype]:g} "
                    f"against the definition ({encoding}, {dtype}), got {error:.3g}: not measured"
                )
            errors[candidate.name, encoding] = error
        return errors


def make_inputs(
    B: int, T: int, heads: int, key_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Random inputs with w of unit norm, β in [0, 2], gates around 0.88; the seed is fixed."""
    if heads % key_heads:
        raise ValueError(f"key_heads: expected a divisor of {heads} heads, got {key_heads}")
    rng = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    q = normal(B, T, heads, size).to(dtype)
    k, v = (normal(B, T, key_heads, size).to(dtype) for _ in range(2))
    w = F.normalize(normal(B, T, key_heads, size), dim=-1)
    beta = 2 * torch.rand(B, T, key_heads, generator=rng, device=device)
    log_forget = F.logsigmoid(normal(B, T, heads) + 2)
    return Inputs(*(x.requires_grad_() for x in (q, k, v, w, beta, log_forget)))


def _make_definition(x: Inputs, encoding: str):
    w, beta = (x.w, x.beta) if encoding.startswith("path") else (None, None)
    gate = x.log_forget if encoding.endswith("fox") else None
    return lambda: path_attention(x.q, x.k, x.v, w, beta, gate, implementation="definition")


_DEFINITION = Candidate(name="definition", encodings=ENCODINGS, make=_make_definition)


def _job(candidate: Candidate, inputs: Inputs, encoding: str) -> Job:
    grad_out = torch.ones_like(inputs.q) * torch.linspace(-1, 1, inputs.q.shape[3]).to(inputs.q)
    return Job(candidate.make(inputs, encoding), inputs.used_by(encoding), grad_out)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu, cuda or auto, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or auto, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected one that is here, got cuda and no GPU")
    return device


def _numbers(name: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{name}: expected positive integers with commas between, got {text!r}")
    return [int(word) for word in words]


def _words(name: str, text: str, known: Sequence[str]) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {word!r}")
    return words
