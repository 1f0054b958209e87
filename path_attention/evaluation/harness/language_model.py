"""A causal language model as lm-eval asks for one: bounded memory, kept answers, no silent cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

from path_attention.evaluation.harness.answers import Answers
from path_attention.evaluation.harness.batches import BatchSize
from path_attention.evaluation.reading import PIECE, Row, greedy_answers, log_likelihoods
from path_attention.models.generation import decode_answer
from path_attention.models.loading import load_model_on, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Truncate = Literal["no", "left", "middle"]
Progress = Callable[[str, int, int], None]
_DEFAULT_NEW_TOKENS = 256  # lm-eval's


@dataclass
class Context:
    """What the requests of one task came to, in tokens.

    Attributes:
        longest: the most that one was read with, tokens to be written included.
        cut: requests that were longer than the context, and lost tokens.
        requests: all of them.
    """

    longest: int = 0
    cut: int = 0
    requests: int = 0


class CausalLM(TemplateLM):
    """A loaded model with its tokenizer.

    Attributes:
        context: the most tokens that a request may come to; None for no limit.
        contexts: what requests of each task came to.
        batch_size_found: `BatchSize`, with the largest batch that was run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int | None,
        truncate: Truncate = "no",
        batch_size: int | None = None,
        answers: Answers | None = None,
        add_bos: bool | None = None,
        piece: int = PIECE,
        progress: Progress = lambda label, done, total: None,
    ) -> None:
        """add_bos: start texts with the beginning-of-text token; None: as the tokenizer does."""
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.context, self.truncate, self.piece = context, truncate, piece
        self.add_bos = starts_texts(tokenizer) if add_bos is None else add_bos
        self.progress = progress
        self.answers = Answers(None, {}) if answers is None else answers
        self.contexts: defaultdict[str, Context] = defaultdict(Context)
        ends: Any = getattr(model.generation_config, "eos_token_id", None)
        self._ends = {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}
        grows = model.device.type == "cuda"
        self.batch_size_found = BatchSize(batch_size, grows=grows)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> CausalLM:
        """`create_from_arg_obj`, from "pretrained=FOLDER,dtype=bfloat16,…"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> CausalLM:
        """What `lm_eval.simple_evaluate("path_attention", {"pretrained": FOLDER, …})` asks for.

        Args:
            arg_dict: pretrained, a run's or a model's folder; dtype ("float32"); options of the
                constructor. The context is what the model was trained at, unless it is given.
            additional_config: batch_size, a number or "auto"; device.

        Raises ValueError naming pretrained if it is not there.
        """
        more = {k: v for k, v in (additional_config or {}).items() if v is not None}
        options = {**more, **arg_dict}
        folder = options.pop("pretrained", None)
        if folder is None:
            raise ValueError(f"pretrained: expected a model's folder, got {arg_dict}")
        options.pop("max_batch_size", None)
        if str(options.get("batch_size")).startswith("auto"):
            del options["batch_size"]
        dtype, device = options.pop("dtype", "float32"), options.pop("device", "auto")
        model = load_model_on(folder, dtype, device)
        options.setdefault("context", getattr(model.config, "max_position_embeddings", None))
        return cls(model, load_tokenizer(folder, model), **options)

    # --- What lm-eval asks for by name ------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        token: Any = self.tokenizer.eos_token_id  # pyright: ignore[reportAttributeAccessIssue]
        return token

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows: the beginning of text, or else the end of one."""
        token: Any = self.tokenizer.bos_token_id  # pyright: ignore[reportAttributeAccessIssue]
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        """Its folder's name, which lm-eval's own caches go by."""
        return str(self.tokenizer.name_or_path)

    @property
    def max_length(self) -> int | None:
        """The context, for tasks that ask."""
        return self.context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; with the beginning-of-text token if this model takes one and it is not there.

        add_special_tokens: False for none; None leaves it to `add_bos`.
        """
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False)
        first: Any = self.tokenizer.bos_token_id  # pyright: ignore[reportAttributeAccessIssue]
        wanted = self.add_bos if add_special_tokens is None else add_special_tokens
        return [first, *ids] if wanted and first is not None and ids[:1] != [first] else ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as the text that the model was trained to answer."""
        text: Any = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        raise NotImplementedError  # `loglikelihood` below takes its place

    # --- The three kinds of request ---------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log p of the continuation, whether it is greedy) of each request."""
        rows = []
        for request in requests:
            context, continuation = _arguments(request)
            if context:
                pair = self._encode_pair(context, continuation)
            else:
                pair = ([self.prefix_token_id], self.tok_encode(continuation, False))
            if not pair[0]:  # a context of blanks alone, which went to the continuation
                pair = ([self.prefix_token_id], pair[1])
            rows.append(self._fit_row(request, pair))
        found = self._likelihoods("loglikelihood", rows)
        return [(float(total), bool(greedy)) for total, greedy in found]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """log p of each text, in windows of the context that follow one another.

        The windows are lm-eval's. It adds a tokenizer's beginning-of-text token to the text and
        counts how likely that one is too; here it is context alone.
        """
        rows: list[Row] = []
        owners: list[int] = []
        for n, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], False)
            windows = get_rolling_token_windows(
                ids, self.prefix_token_id, self.context or max(len(ids), 1), 1
            )
            for context, continuation in map(make_disjoint_window, windows):
                rows.append((context, continuation))
                owners.append(n)
                self._count(request, len(context) + len(continuation) - 1)
        totals = [0.0] * len(requests)
        found = self._likelihoods("loglikelihood_rolling", rows)
        for owner, (total, _) in zip(owners, found, strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each prompt, greedily, up to one of its stops.

        Raises ValueError if a request asks for sampling.
        """
        plans = [self._plan(request) for request in requests]
        kinds: defaultdict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for n, plan in enumerate(plans):
            if self.answers.get("generate_until", *plan) is None:
                kinds[plan[1:]].append(n)
        done = sum(len(group) for group in kinds.values())
        total, done = len(plans), len(plans) - done
        for (new_tokens, until), group in kinds.items():

            def answer(
                batch: Sequence[int], most: int = new_tokens, until: tuple[str, ...] = until
            ) -> list[str]:
                prompts = [plans[n][0] for n in batch]
                ended = self._ending(until)
                written = greedy_answers(self.model, prompts, most, ended, self.piece)
                pairs = zip(prompts, written, strict=True)
                return [self._text(prompt, ids, until) for prompt, ids in pairs]

            run = self.batch_size_found.run(group, lambda n: len(plans[n][0]), answer)
            for n, text in run:
                self.answers.put("generate_until", *plans[n], text)
                done += 1
                self.progress("write", done, total)
        return [self.answers.get("generate_until", *plan) for plan in plans]

    # --- Inside -----------------------------------------------------------------------------------

    def _likelihoods(self, kind: str, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        left = [n for n, row in enumerate(rows) if self.answers.get(kind, *row) is None]
        done = len(rows) - len(left)
        run = self.batch_size_found.run(
            left,
            lambda n: len(rows[n][0]) + len(rows[n][1]),
            lambda batch: log_likelihoods(self.model, [rows[n] for n in batch], self.piece),
        )
        for n, found in run:
            self.answers.put(kind, *rows[n], found)
            done += 1
            self.progress("score", done, len(rows))
        return [self.answers.get(kind, *row) for row in rows]

    def _plan(self, request: Instance) -> tuple[list[int], int, tuple[str, ...]]:
        """(prompt's token ids, tokens to write, stops) of a request, or ValueError."""
        text, options = _arguments(request)
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            raise ValueError(f"{request.task_name}: expected greedy decoding, got {options}")
        until = options.get("until") or []
        until = (until,) if isinstance(until, str) else tuple(until)
        new_tokens = int(options.get("max_gen_toks", _DEFAULT_NEW_TOKENS))
        ids = self.tok_encode(text) or [self.prefix_token_id]
        return self._fit(request, ids, new_tokens), new_tokens, until

    def _fit_row(self, request: Instance, row: tuple[list[int], list[int]]) -> Row:
        context, continuation = row
        return self._fit(request, context, len(continuation) - 1), continuation

    def _fit(self, request: Instance, ids: list[int], behind: int) -> list[int]:
        """A prompt's tokens, cut to what the context leaves beside those behind it.

        Raises ValueError if they are too many and cutting was not asked for.
        """
        room = None if self.context is None else self.context - behind
        if room is None or len(ids) <= room:
            self._count(request, len(ids) + behind)
            return ids
        if self.truncate == "no" or room < 2:
            raise ValueError(
                f"context: expected room for a request of {request.task_name} of "
                f"{len(ids) + behind} tokens, got {self.context}; raise --context, or cut by "
                "--truncate left or middle"
            )
        self._count(request, room + behind, cut=1)
        if self.truncate == "left":
            return ids[-room:]
        return ids[: room // 2] + ids[len(ids) - (room - room // 2) :]

    def _count(self, request: Instance, tokens: int, cut: int = 0) -> None:
        seen = self.contexts[request.task_name or ""]
        seen.longest = max(seen.longest, tokens)
        seen.cut += cut
        seen.requests += 1

    def _ending(self, until: Iterable[str]) -> Callable[[list[int]], bool]:
        """Whether a row is at its end: the end-of-text token, or one of the texts to stop at."""
        until = tuple(until)
        tail = max(map(len, until), default=0) + 8  # a token is at least a byte of a text

        def ended(written: list[int]) -> bool:
            if written[-1] in self._ends:
                return True
            if not until:
                return False
            text: Any = self.tokenizer.decode(written[-tail:], skip_special_tokens=False)
            return any(stop in text for stop in until)

        return ended

    def _text(self, prompt: Sequence[int], ids: list[int], until: Iterable[str]) -> str:
        """What was written behind a prompt, up to a stop."""
        if ids[-1] in self._ends:
            ids = ids[:-1]
        text = decode_answer(self.tokenizer, prompt, ids)
        for stop in until:
            text = text.split(stop)[0] if stop else text
        return text


register_model("path_attention")(CausalLM)


def starts_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer by itself starts each text with its beginning-of-text token."""
    first: Any = tokenizer.bos_token_id  # pyright: ignore[reportAttributeAccessIssue]
    return first is not None and tokenizer.encode("a")[:1] == [first]


def _arguments(request: Instance) -> Any:
    """A request's arguments, which are two whatever lm-eval's types say."""
    return request.args
