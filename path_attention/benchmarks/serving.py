"""The command `path-attention benchmark serving`: tokens a second of many requests at once."""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    name_of,
    numbers,
    pick_device,
    pick_dtype,
    publish,
    say,
    words,
)
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.models import PRESETS, PathAttentionConfig, PathAttentionForCausalLM
from path_attention.serving.command import make_engine
from path_attention.serving.engine import Engine
from path_attention.serving.request import Piece, Refused, Request, Sampling
from path_attention.serving.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Width, layers, heads, vocabulary. "small" is the laptop demo's.
SHAPES = {"760m": (1536, 24, 24, 32000), "small": (192, 4, 3, 4096)}
_OURS, _PEER = "path-attention", "transformers"
_WARM = 2  # bursts before those that count: one without kept prefixes, one with
_PEER_WARM = 8  # tokens of each answer of the peer's one burst before: it compiles nothing
_PREFIX_BYTES = 2**33  # for what all prompts share, beside the caches


class Burst(NamedTuple):
    """What became of requests that came at once."""

    seconds: float
    tokens: int
    first: list[float]  # seconds to the first token of each
    answers: list[tuple[int, ...]]  # of this package's engine


@dataclass(frozen=True, kw_only=True)
class BenchmarkServing:
    """Output tokens a second and time to the first token of requests that come at once.

    A model of random weights by this package's engine, with and without prefix reuse, and one of
    the same shape with RoPE through transformers' continuous batching. All prompts begin alike.
    Each burst is as many requests as run at once; the first one fills the prefix store, the second
    one warms up what then is found (transformers' engine, which compiles nothing, has the first
    alone, with short answers). Writes OUT.json and OUT.png and prints the table.
    """

    shape: str = "760m"
    """760m, or small: the laptop demo's."""
    presets: str = "path,rope"
    """By this package's engine, with commas between."""
    peer: bool = True
    """Also RoPE by transformers' continuous batching."""
    concurrency: str = "1,8,64"
    """Requests at once, with commas between."""
    prompt: int = 8192
    """Tokens of each prompt."""
    shared: int = 7168
    """Of which so many are the same for all."""
    output: int = 128
    """Tokens of each answer."""
    rounds: int = 2
    """Bursts that count."""
    prefill: int = 0
    """Tokens of prompts between two steps of decoding; 0 is what the engine takes by itself."""
    dtype: str = "auto"
    """bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …"""
    out: Path = Path("results/serving")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "serving",
            what="Output tokens a second of all requests together, and milliseconds to the first "
            "token (median and 95th percentile), of bursts of requests whose prompts begin alike",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=_draw,
        )
        kept.delete()
        names = ("engine", "encoding", "concurrency", "reuse", "tokens_per_second",
                 "first_token_ms", "first_token_p95_ms")  # fmt: skip
        print_rows(result, names)

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. ValueError on bad options."""
        at_least(self, prompt=2, shared=0, output=1, rounds=1, prefill=0)
        words("shape", self.shape, list(SHAPES))
        if self.shared >= self.prompt:
            raise ValueError(f"shared: expected less than {self.prompt}, got {self.shared}")
        counts, dtype = numbers("concurrency", self.concurrency), pick_dtype(self.dtype, device)
        rows: list[dict[str, Any]] = []
        wanted: list[tuple[str, str, Callable[[], Any]]] = [
            (_OURS, preset, partial(make_model, self.shape, preset, device, dtype))
            for preset in words("presets", self.presets, list(PRESETS))
        ]
        if self.peer:
            llama = partial(make_llama, self.shape, device, dtype, self.prompt + self.output)
            wanted.append((_PEER, "rope", llama))
        for engine, encoding, make in wanted:
            model = cache(make)  # made where rows are missing
            for count, reuse in product(counts, (True, False)):
                name = (engine, encoding, count, reuse)
                unit = f"{engine} {encoding}, {count} at once, {_how(reuse)}"
                rows += keep(unit, partial(self._measured, name, model, dtype, report))
            del model
            free_memory(device)
        return rows

    def _measured(
        self,
        name: tuple[str, str, int, bool],
        model: Callable[[], Any],
        dtype: torch.dtype,
        report: Report,
    ) -> list[dict[str, Any]]:
        """The row of an engine and a load; none, and a line, where a peer fails."""
        engine, encoding, count, reuse = name
        bursts = self._bursts if engine == _OURS else self._peer_bursts
        try:
            row = self._row(*name, dtype, bursts(model(), count, reuse))
        except Exception as failure:
            if engine == _OURS:
                raise
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())
            report(f"{engine} {encoding}, {count} at once: fails here: {reason[:200]}")
            return []
        free_memory(model().device)
        report(_told(row))
        return [row]

    def _settings(self, count: int, reuse: bool, device: torch.device) -> Settings:
        return Settings(
            max_prompt_tokens=self.prompt,
            max_output_tokens=self.output,
            max_rows=count,
            prefill_tokens=self.prefill,
            cache_bytes=_room(device),
            prefix_bytes=_PREFIX_BYTES if reuse else 0,
        )

    def _prompts(self, count: int, turn: int, vocabulary: int) -> list[list[int]]:
        """Of one burst: the beginning is always the same, the rest never is."""
        shared = random_ids(self.shared, 0, vocabulary)
        own = self.prompt - self.shared
        seeds = range(1 + turn * count, 1 + (turn + 1) * count)
        return [shared + random_ids(own, seed, vocabulary) for seed in seeds]

    def _bursts(self, model: PathAttentionForCausalLM, count: int, reuse: bool) -> list[Burst]:
        vocabulary, settings = SHAPES[self.shape][3], self._settings(count, reuse, model.device)
        with running(model, settings) as engine:
            bursts = [
                burst(engine, self._prompts(count, turn, vocabulary), self.output)
                for turn in range(self.rounds + _WARM)
            ]
        return bursts[_WARM:]

    def _row(
        self,
        engine: str,
        encoding: str,
        count: int,
        reuse: bool,
        dtype: torch.dtype,
        bursts: Sequence[Burst],
    ) -> dict[str, Any]:
        first = sorted(1e3 * x for one in bursts for x in one.first)
        late = quantiles(first, n=20, method="inclusive")[-1] if len(first) > 1 else first[0]
        speed = sum(one.tokens for one in bursts) / sum(one.seconds for one in bursts)
        return {
            "engine": engine,
            "encoding": encoding,
            "shape": self.shape,
            "dtype": name_of(dtype),
            "concurrency": count,
            "reuse": reuse,
            "prompt": self.prompt,
            "shared": self.shared,
            "output": self.output,
            "rounds": self.rounds,
            "tokens_per_second": float(f"{speed:.4g}"),
            "first_token_ms": float(f"{median(first):.4g}"),
            "first_token_p95_ms": float(f"{late:.4g}"),
        }

    def _peer_bursts(self, model: Any, count: int, reuse: bool) -> list[Burst]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        options = GenerationConfig(
            max_new_tokens=self.output, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(allow_block_sharing=reuse)
        bursts = []
        try:
            for turn in range(self.rounds + 1):
                wanted = self.output if turn else min(self.output, _PEER_WARM)
                done = model.generate_batch(
                    self._prompts(count, turn, SHAPES[self.shape][3]),
                    max_new_tokens=wanted,
                    generation_config=options,
                    continuous_batching_config=batching,
                    record_timestamps=True,
                    persistent_manager=True,
                )
                answers = list(done.values())
                stamps = [x for answer in answers for x in answer.timestamps]
                tokens = sum(len(answer.generated_tokens) for answer in answers)
                if tokens != count * wanted:
                    raise RuntimeError(f"{tokens} tokens of {count * wanted}")
                first = [answer.timestamps[0] - answer.created_time for answer in answers]
                start = min(answer.created_time for answer in answers)
                bursts.append(Burst(max(stamps) - start, tokens, first, []))
        finally:
            model.destroy_cached_continuous_batching_manager()
        return bursts[1:]


def make_model(
    shape: str, preset: str, device: torch.device, dtype: torch.dtype
) -> PathAttentionForCausalLM:
    """Random weights, the same each time."""
    width, layers, heads, vocabulary = SHAPES[shape]
    config = PathAttentionConfig.from_preset(
        preset,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = PathAttentionForCausalLM(config)
    return model.to(dtype=dtype).eval()  # pyright: ignore[reportCallIssue]


def make_llama(shape: str, device: torch.device, dtype: torch.dtype, room: int) -> Any:
    """A model of transformers' own with RoPE, of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, vocabulary = SHAPES[shape]
    like: Any = PathAttentionConfig.from_preset(
        "rope", hidden_size=width, num_attention_heads=heads
    )
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=like.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=room,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(dtype=dtype).eval()  # pyright: ignore[reportCallIssue]


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    """As many tokens as asked for; nothing ends a text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {f"t{n} ": n for n in range(vocabulary)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(names, "t0 ")))


def random_ids(count: int, seed: int, vocabulary: int) -> list[int]:
    """Token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


def _room(device: torch.device) -> int:
    """Bytes of caches: four fifths of what is free on a GPU, as many as it takes on a CPU."""
    return torch.cuda.mem_get_info(device)[0] * 4 // 5 if device.type == "cuda" else 2**40


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more: sizes are chosen by what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def running(model: Any, settings: Settings) -> Iterator[Engine]:
    """An engine that works until the block ends."""
    engine = make_engine(model, make_tokenizer(model.config.vocab_size), settings)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0)


def burst(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> Burst:
    """Submit requests at once and wait for all of them. Raises `Refused` if one fails."""
    came: queue.Queue[tuple[int, float, Piece | Refused]] = queue.Queue()
    started, first, answers = time.perf_counter(), {}, {}
    for n, prompt in enumerate(prompts):

        def deliver(piece: Piece | Refused, n: int = n) -> None:
            came.put((n, time.perf_counter(), piece))

        sampling = Sampling(temperature=0)
        engine.submit(Request(prompt=prompt, max_tokens=tokens, sampling=sampling, deliver=deliver))
    now = started
    while len(answers) < len(prompts):
        n, now, piece = came.get()
        if isinstance(piece, Refused):
            raise piece
        first.setdefault(n, now - started)
        if piece.finish is not None:
            answers[n] = piece.token_ids
    total = sum(map(len, answers.values()))
    told = [answers[n] for n in range(len(prompts))]
    return Burst(now - started, total, list(first.values()), told)


def _how(reuse: bool) -> str:
    return "with prefix reuse" if reuse else "without prefix reuse"


def _told(row: Mapping[str, Any]) -> str:
    speed, first = row["tokens_per_second"], row["first_token_ms"]
    return (
        f"{row['engine']} {row['encoding']}, {row['concurrency']} at once, {_how(row['reuse'])}: "
        f"{speed:,.0f} tokens/s, first token after {first:.4g} ms"
    )


def _draw(result: Mapping[str, Any], path: Any) -> None:
    from path_attention.benchmarks.figure import Panel, draw_bars

    def bars(name: str) -> dict[tuple[str, str], float | None]:
        found = {}
        for row in result["rows"]:
            series = f"{row['engine']} {row['encoding']}{'' if row['reuse'] else ', no reuse'}"
            found[series, f"{row['concurrency']} at once"] = row[name]
        return found

    panels = [
        Panel("output", "tokens a second", bars("tokens_per_second"), logarithmic=True),
        Panel("first token", "milliseconds, median", bars("first_token_ms"), logarithmic=True),
    ]
    draw_bars(panels, f"{result['device']}: requests that come at once", path)
