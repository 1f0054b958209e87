"""The engine for any other transformers model: `generate`, one answer at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList

from path_attention.serving.answer import Answer, Ticket, choose, describe
from path_attention.serving.engine import Engine, log
from path_attention.serving.sampler import token_logprobs
from path_attention.serving.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class GenerateEngine(Engine):
    """Serves a model that this library's caches know nothing of, through its own `generate`.

    No batching, no shared prefixes, no drafts: requests wait for one another. Tokens are chosen as
    in `BatchedEngine`; of the model's generation settings those that choose tokens are dropped.
    """

    kind: ClassVar[str] = "generate"

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings
    ) -> None:
        super().__init__(model, tokenizer, settings)
        # Penalties and the like of the model's own would change what requests ask for.
        own = model.generation_config
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "cache_implementation")
        model.generation_config = GenerationConfig(**{x: getattr(own, x, None) for x in names})
        log.warning(
            "%s is none of this library's models: it is served through transformers' generate, "
            "one answer at a time, without shared prefixes",
            type(model).__name__,
        )

    @property
    def context_length(self) -> int | None:
        """As the model's configuration says."""
        config: Any = self.model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None)

    @property
    def rows(self) -> int:
        return 1

    @property
    def most_choices(self) -> int:
        return self.settings.max_rows

    def can_admit(self, ticket: Ticket) -> bool:
        return not self.running

    def admit(self, ticket: Ticket) -> None:
        pass

    def release(self, ticket: Ticket) -> None:
        pass

    @torch.no_grad()
    def step(self) -> None:
        """One choice from its beginning to its end."""
        ticket = self.running[0]
        request = ticket.request
        ids = torch.tensor([request.prompt], device=self.model.device)
        if request.prompt_logprobs and not ticket.prompt_logprobs:
            logits = self.model(ids).logits[0, :-1]
            ticket.prompt_logprobs = token_logprobs(
                logits, request.prompt[1:], request.logprobs or 0
            )
        answer = next(x for x in ticket.answers if x.finish is None)
        answer.begin()
        if not request.max_tokens:
            answer.end()
            return
        follower = _Follower(self, answer)
        self.model.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            num_beams=1,
            logits_processor=LogitsProcessorList([follower]),
            stopping_criteria=StoppingCriteriaList([_Ended(follower)]),
        )


class _Follower(LogitsProcessor):
    """Chooses each token itself, and leaves `generate` no other."""

    def __init__(self, engine: GenerateEngine, answer: Answer) -> None:
        self.engine, self.answer = engine, answer

    @property
    def over(self) -> bool:
        """Whether nothing is to come: it has ended, nobody waits, or its time is over."""
        return self.answer.finish is not None or self.engine.gone(self.answer.ticket)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.engine.mind_queue()  # the engine's loop is in this step for a whole answer
        (token,) = choose(scores, [self.answer])
        if token is None:
            raise FloatingPointError("logits: expected numbers, got others")
        self.engine.accept(self.answer, [token], describe(scores, [token], self.answer))
        forced = torch.full_like(scores, -torch.inf)
        forced[:, token] = 0
        return forced


class _Ended(StoppingCriteria):
    def __init__(self, follower: _Follower) -> None:
        self._follower = follower

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        over = self._follower.over
        return torch.full((len(input_ids),), over, dtype=torch.bool, device=input_ids.device)
