"""The language models: pre-normalised blocks of attention and SwiGLU, readable top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from path_attention.models.cache import CACHE_NAME, PathAttentionCacheLayer, layer_caches
from path_attention.models.configuration import PathAttentionConfig
from path_attention.models.padding import Rows, in_two
from path_attention.models.prefix_store import PrefixStore
from path_attention.models.static_cache import StaticPathCache
from path_attention.nn.angles import AngleTable
from path_attention.nn.attention import Attention, count_positions
from path_attention.nn.cache import LayerCache
from path_attention.nn.encoding import Decay, Transport
from path_attention.nn.normalization import RMSNorm
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.packing import Packing

# What callers pass to any model and a model without them has no use for.
_IGNORED = ("token_type_ids", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch")


class SwiGLU(nn.Module):
    """down(silu(gate(x)) ⊙ up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PathAttentionBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: PathAttentionConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, cast(int, config.intermediate_size))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        token_ids: Tensor | None = None,
        packing: Packing | None = None,
        valid: Tensor | None = None,
        layer_cache: LayerCache | None = None,
        split: ContextSplit | None = None,
    ) -> Tensor:
        attended = self.attention(
            self.attention_norm(x),
            positions=positions,
            token_ids=token_ids,
            packing=packing,
            valid=valid,
            cache=layer_cache,
            split=split,
        )
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class PathAttentionPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of the models below."""

    config_class = PathAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PathAttentionBlock"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range) weights, unit norms, and each bias's and encoding's own start.

        transformers calls this inside a guard that leaves loaded parameters as they are.
        """
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=getattr(module, "weight_std", std))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.constant_(module.bias, getattr(module, "bias_init", 0.0))
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, (Transport, Decay)):
            module.reset_parameters(std)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As transformers has it; layers' tables of angles get as many rows."""
        embedding = cast(nn.Embedding, super().resize_token_embeddings(*args, **kwargs))
        for module in self.modules():
            if isinstance(module, AngleTable):
                module.resize(embedding.num_embeddings)
        return embedding


class PathAttentionModel(PathAttentionPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: PathAttentionConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            PathAttentionBlock(config.of_layer(n)) for n in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        packing: Packing | Tensor | None = None,
        split: ContextSplit | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of a chunk of tokens.

        Args:
            input_ids: `[B, T]` integers; or `inputs_embeds` `[B, T, hidden_size]`, unless the
                encoding asks for token ids.
            attention_mask: `[B, T]`, or `[B, past + T]` of which the last T columns are read; 0 is
                padding, which may stand anywhere and leaves no trace in any other token.
            position_ids: checked, not needed: positions are counted from the mask, the cache and
                the packing.
            past_key_values, cache: the past (one name for each version of transformers); extended
                in place.
            use_cache: return a cache; None is `config.use_cache` outside training.
            packing: borders of packed documents (B = 1): a `Packing`, or `cu_seqlens` `[N + 1]`
                (also as transformers' `cu_seq_lens_q`).
            split: the tokens are this process's (`split.take`) of a sequence that lies on several
                processes, all of which call the model, forward and backward. Packed documents are
                the split's; no mask, packing or cache goes with it.
            output_hidden_states: also return the embedding's and every block's output, the last
                one normalised, as transformers has it.

        Returns:
            last_hidden_state `[B, T, hidden_size]`, the cache, hidden states.

        Raises:
            ValueError: naming the argument, what came, and what was expected.
        """
        past = one_of("cache", cache, past_key_values)
        packing = as_packing(one_of("packing", packing, kwargs.pop("cu_seq_lens_q", None)))
        refuse_unknown(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if split is not None:
            use_cache = _check_split(x, split, attention_mask, packing, past, use_cache)
        past = self._cache(past, use_cache, packing)
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        layers = self.config.num_hidden_layers  # fewer than there are in a draft's early exit
        caches = [None] * layers if past is None else layer_caches(past, layers)
        seen = None if caches[0] is None else caches[0].seen
        rows = Rows.of(x, attention_mask, packing, seen=seen)
        told = (past, caches, packing, split, output_hidden_states)
        cut = x.shape[1] if torch.is_grad_enabled() else rows.cut(x.shape[1])
        if attention_mask is not None and cut < x.shape[1]:
            chunk = (input_ids, position_ids)
            return in_two(self._run, x, chunk, attention_mask, cut, seen or 0, told)
        return self._run(rows, x, input_ids, position_ids, *told)

    def _run(
        self,
        rows: Rows,
        x: Tensor,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        past: Cache | None,
        caches: Sequence[PathAttentionCacheLayer | None],
        packing: Packing | None,
        split: ContextSplit | None,
        output_hidden_states: bool,
    ) -> BaseModelOutputWithPast:
        """`forward` of embeddings x, padded as `rows` say, with each layer's cache of `past`."""
        for layer_cache in caches:
            if layer_cache is not None and rows.end is not None:
                layer_cache.note_moved(x.shape[1])
        if past is not None and past.offloading:
            past.layers[0].prefetch()
        positions = count_positions(x, packing, caches[0], split)
        if position_ids is not None:
            rows.check_positions(position_ids, positions)
        x = rows.compact(x)
        token_ids = None if input_ids is None else rows.compact(input_ids)
        of_chunk: dict[str, Any] = {"token_ids": token_ids, "packing": packing, "split": split}
        states = []
        for layer, layer_cache in zip(list(self.layers)[: len(caches)], caches, strict=True):
            if output_hidden_states:
                states.append(rows.restore(x))
            if past is not None and past.offloading and layer_cache is not None:
                layer_cache.prefetch()
            x = layer(x, positions, valid=rows.valid, layer_cache=layer_cache, **of_chunk)
            if past is not None and past.offloading and layer_cache is not None:
                layer_cache.offload()
        x = rows.restore(self.norm(x))
        hidden = (*states, x) if output_hidden_states else None
        kept: dict[str, Any] = {CACHE_NAME: past}
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=hidden, **kept)

    def _cache(
        self, past: Cache | None, use_cache: bool | None, packing: Packing | None
    ) -> Cache | None:
        asked = past is not None or use_cache is True
        if packing is not None and asked:
            raise ValueError("cache: expected none with packed documents, got one asked for")
        if self.gradient_checkpointing and self.training and asked and torch.is_grad_enabled():
            raise ValueError("cache: expected none with gradient checkpointing, got one asked for")
        if past is not None or packing is not None:
            return past
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if use_cache else None


class PathAttentionForCausalLM(PathAttentionPreTrainedModel, GenerationMixin):
    """The model with a next-token head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PathAttentionConfig) -> None:
        super().__init__(config)
        self.model = PathAttentionModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        packing: Packing | Tensor | None = None,
        split: ContextSplit | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and their loss against labels.

        Args:
            labels: `[B, T]`: token t is the target of token t − 1; −100 is no target, nor is
                padding or the first token of a row or of a packed document. Under a split they are
                aligned with the logits instead (`split.targets`).
            logits_to_keep: logits of the last n tokens only (0: all), or of these indices.
            num_items_in_batch: divides the summed loss; None for the mean over these targets. Under
                a split a process's loss is its own tokens' share: those of all processes sum to the
                sequence's.
            Others: as in `PathAttentionModel.forward`.

        Returns:
            loss (float32), logits `[B, kept, vocab_size]`, the cache, hidden states.

        Raises:
            ValueError: naming the argument, what came, and what was expected.
        """
        packing = as_packing(one_of("packing", packing, kwargs.pop("cu_seq_lens_q", None)))
        past = one_of("cache", cache, past_key_values)
        if isinstance(past, StaticPathCache) and input_ids is not None and input_ids.shape[1] == 1:
            asked = (labels, inputs_embeds, position_ids, packing, split)
            states = kwargs.get("output_hidden_states") or self.config.output_hidden_states
            plain = not states and all(x is None for x in asked)
            if plain and not torch.is_grad_enabled():
                logits = past.step(self, input_ids)
                if logits is not None:
                    held: dict[str, Any] = {CACHE_NAME: past}
                    return CausalLMOutputWithPast(logits=logits.clone(), **held)  # pyright: ignore
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            packing=packing,
            split=split,
            **kwargs,
        )
        x = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            kept = x[:, logits_to_keep]
        else:
            kept = x[:, -logits_to_keep:] if logits_to_keep else x
        logits = self.lm_head(kept)
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels: expected {list(logits.shape[:2])}, one for each token's logits, "
                    f"got {list(labels.shape)}"
                )
            loss = next_token_loss(
                logits, labels, attention_mask, packing, num_items_in_batch, split
            )
        kept_past: dict[str, Any] = {CACHE_NAME: outputs.get(CACHE_NAME)}
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **kept_past
        )

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        prefix_store: PrefixStore | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, which may start from a store of prefixes and adds to it.

        Args:
            prefix_store: of this model. One prompt without padding (with any number of beams or
                samples): what the store has of it is not computed again, and prompt and result are
                kept there.
            Others: as in transformers.

        Raises:
            ValueError: naming the argument, what came, and what was expected.
        """
        if prefix_store is None:
            return super().generate(inputs, *args, **kwargs)  # pyright: ignore
        ids = kwargs.get("input_ids", inputs)
        mask = kwargs.get("attention_mask")
        if prefix_store.model is not self:
            raise ValueError("prefix_store: expected one of this model, got another's")
        if ids is None or (mask is not None and not mask.all()):
            raise ValueError("prefix_store: expected token ids without padding")
        if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
            raise ValueError("prefix_store: expected no cache beside it, got one")
        config = kwargs.get("generation_config") or self.generation_config
        lookup = kwargs.get("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens)
        if lookup is not None or kwargs.get("assistant_model") is not None:
            # transformers computes the whole prompt again on top of a cache it is given.
            raise ValueError("prefix_store: expected no drafts beside it, got some asked for")
        asked = (kwargs.get(n, getattr(config, n)) for n in ("num_beams", "num_return_sequences"))
        copies = max(n or 1 for n in asked)
        # transformers would take a padding token inside the text for padding.
        kwargs["attention_mask"] = torch.ones_like(ids)
        kwargs[CACHE_NAME] = cache = prefix_store.prefill(ids)
        if copies > 1:
            cache.batch_repeat_interleave(copies)
        out = super().generate(inputs, *args, **kwargs)  # pyright: ignore
        if copies == 1:
            prefix_store.put(out if isinstance(out, Tensor) else out.sequences, cache)
        return out

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers' own, without position_ids, which are counted from mask and cache.

        Nor the tokenizers that transformers passes on with `stop_strings` and drafts.
        """
        generation: Any = super()
        inputs = generation.prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        for name in ("position_ids", "tokenizer", "assistant_tokenizer"):
            inputs.pop(name, None)
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, *args: Any
    ) -> Any:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full", "offloaded", "static"):
            raise ValueError(
                "cache_implementation: expected None, 'dynamic', 'offloaded' or 'static', "
                f"got {kind!r}"
            )
        generation: Any = super()
        given = (generation_config, model_kwargs, generation_mode, *args)
        done = generation._prepare_cache_for_generation(*given)
        cache, config = model_kwargs.get(CACHE_NAME), generation_config
        drafts = generation_mode == GenerationMode.ASSISTED_GENERATION or config.is_assistant
        if kind == "static" and cache and not (drafts or config.return_dict_in_generate):
            # It ends with the call, which takes no tokens back.
            room, model_config = cache.layers[0].get_max_length(), cast(Any, self.config)
            model_kwargs[CACHE_NAME] = StaticPathCache(model_config, room, croppable=False)
        if kind == "static" and drafts:  # which transformers 5.17 refuses by this word alone
            config.cache_implementation = None
        return done

    def _prepare_static_cache(self, *args: Any, max_cache_len: int, **kwargs: Any) -> Cache:
        return StaticPathCache(self.config, max_cache_len)  # pyright: ignore[reportArgumentType]


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None,
    num_items_in_batch: int | Tensor | None,
    split: ContextSplit | None = None,
) -> Tensor:
    """Cross-entropy (nats, float32) of token t's logits against label t + 1.

    The sum over targets divided by `num_items_in_batch`, or their mean; no target at all gives 0.
    logits `[B, T, V]`, labels `[B, T]`; −100, padding, and tokens without a predecessor in their
    own document are no targets. Under a split, labels are this process's `split.targets`: token t's
    logits against label t, and the mean is over the targets of all processes.
    """
    labels = labels.to(logits.device)
    if packing is not None:
        labels = labels.masked_fill(packing.position_ids()[None].to(labels.device) == 0, -100)
    if attention_mask is not None:
        real = attention_mask[:, -labels.shape[1] :].to(labels.device).bool()
        labels = labels.masked_fill(~real, -100)
        labels[:, 1:].masked_fill_(~real[:, :-1], -100)
    if split is None:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss / (
        count_targets(labels, split) if num_items_in_batch is None else num_items_in_batch
    )


def count_targets(targets: Tensor, split: ContextSplit | None = None) -> Tensor:
    """How many targets are none of −100, of all processes under a split; at least 1."""
    count = (targets != -100).sum()
    return (count if split is None else split.sum(count)).clamp(min=1)


def _check_split(
    x: Tensor,
    split: ContextSplit,
    attention_mask: Tensor | None,
    packing: Packing | None,
    past: Cache | None,
    use_cache: bool | None,
) -> bool:
    """Raise ValueError on what does not go with a split; `use_cache` is False with one."""
    named = {"attention_mask": attention_mask, "packing": packing, "cache": past}
    for name, given in named.items():
        if given is not None:
            raise ValueError(f"{name}: expected None with a split, got {type(given).__name__}")
    if use_cache:
        raise ValueError("use_cache: expected None or False with a split, got True")
    split.check_tokens("input_ids", x)
    return False


def one_of(name: str, first: Any, second: Any) -> Any:
    """The one given of an argument's two names. Raises ValueError if both are."""
    if first is not None and second is not None:
        raise ValueError(f"{name}: expected once, got it under both of its names")
    return second if first is None else first


def as_packing(packing: Packing | Tensor | None) -> Packing | None:
    """A `Packing` from one, or from `cu_seqlens`."""
    return Packing.from_cu_seqlens(packing) if isinstance(packing, Tensor) else packing


def refuse_unknown(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments that the model would otherwise swallow."""
    if kwargs.pop("output_attentions", None):
        raise ValueError("output_attentions: expected False, got True: no scores are kept")
    unknown = sorted(set(kwargs) - set(_IGNORED))
    if unknown:
        raise ValueError(f"forward: expected its own arguments, got {unknown} too")
