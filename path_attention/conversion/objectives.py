"""What each stage of a conversion minimises, as objectives of the training loop.

- `MatchAttention`: each layer's attention against the teacher's, on the teacher's own activations:
  layer n of the student sees what layer n of the teacher sees. One pass serves all layers, and no
  activation is kept for longer than its layer (arXiv 2505.03005, stage 1).
- `MatchLogits`: the student's next-token distributions against the teacher's (`divergence`).
- `NextToken`: plain pretraining, with the same choice of what is trained.
"""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from path_attention.conversion.divergence import CHUNK, divergence
from path_attention.conversion.lora import LoraRecipe, add_adapters, merge_adapters
from path_attention.conversion.teacher import Teacher, is_attention, is_encoding
from path_attention.nn.attention import count_positions
from path_attention.nn.encoding import RotaryHouseholder
from path_attention.training.flops import (
    ModelFlops,
    attention_size,
    forward_flops,
    linear_weights,
)
from path_attention.training.objective import Objective
from path_attention.training.processes import Processes, spread
from path_attention.training.recipe import check_choices
from path_attention.training.rows import IGNORED, Row

if TYPE_CHECKING:
    from path_attention.models import PathAttentionConfig
    from path_attention.training.recipe import Recipe

Trainable = Literal["all", "attention", "encoding", "lora"]
# linear layers of attention that read the block's input, which is the teacher's and has no gradient
_READ_INPUT = ("q_proj", "k_proj", "v_proj", "w_proj", "w_proj.0", "beta_proj", "forget_proj")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the objectives share.

    Attributes:
        trainable: "all"; "attention": the attention layers; "encoding": w, β and gates alone;
            "lora": these, and low-rank updates of the other matrices.
        lora: of "lora".
        exchange: the share of the steps after which RoPE is gone, for a student that has it beside
            PaTH: its share of the angles falls in a straight line from 1. None for no such student.
    """

    trainable: Trainable = "all"
    lora: LoraRecipe = field(default_factory=LoraRecipe)
    exchange: float | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        if self.exchange is not None and not 0 < self.exchange <= 1:
            raise ValueError(f"exchange: expected in (0, 1] or None, got {self.exchange}")

    def share(self, step: int, steps: int) -> float:
        """The share of RoPE's angles at a step; 0 at the last."""
        if self.exchange is None or step >= steps - 1:
            return 0.0
        last = max(math.ceil(self.exchange * steps) - 1, 1)
        return max(0.0, 1 - step / last)


class NextToken(Objective):
    """Next-token cross-entropy on a chosen part of the parameters."""

    kind = "tokens"

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self._exchanged: list[RotaryHouseholder] = []

    def course(self) -> dict[str, Any]:
        choices = self.choices
        lora = choices.lora.course() if choices.trainable == "lora" else {}
        return {
            "objective": self.kind,
            "trainable": choices.trainable,
            "exchange": choices.exchange,
            **lora,
        }

    def prepare(
        self, model: nn.Module, recipe: Recipe, processes: Processes, dtype: torch.dtype
    ) -> None:
        self._exchanged = [m for m in model.modules() if isinstance(m, RotaryHouseholder)]
        if bool(self._exchanged) != (self.choices.exchange is not None):
            kept = "keeps RoPE" if self._exchanged else "has no RoPE to exchange"
            raise ValueError(
                f"exchange: expected it with a student that keeps RoPE alone, got "
                f"{self.choices.exchange} with one that {kept}"
            )
        if self.choices.trainable == "lora":
            add_adapters(model, self.choices.lora, recipe.seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self._trains(name))
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                f"trainable: expected parameters to train, the model has no "
                f"{self.choices.trainable}"
            )

    def begin_step(self, step: int, steps: int) -> None:
        for transport in self._exchanged:
            transport.set_share(self.choices.share(step, steps))

    def exported(
        self, config: PathAttentionConfig, state: dict[str, Tensor]
    ) -> tuple[PathAttentionConfig, dict[str, Tensor]]:
        if self.choices.trainable == "lora":
            state = merge_adapters(state, self.choices.lora)
        if self._exchanged:
            config.transport, config.rope_frequencies = "householder", None
            config.nope_layers = None
        return config, state

    def _trains(self, name: str) -> bool:
        kind = self.choices.trainable
        if kind == "all":
            return True
        if kind == "lora":
            return ".lora_" in name or is_encoding(name)
        return is_attention(name) if kind == "attention" else is_encoding(name)


class MatchAttention(NextToken):
    """The mean over layers and features of (student's attention − teacher's)², for each target.

    A document's first token, which attends itself alone, is left out. Norms, MLPs and embedding are
    the teacher's own, frozen in the student; the teacher's attention layers lie beside its.

    Args:
        teacher: of the student.
        choices: "attention" or "encoding" may train.
        relative: divide each layer's error by its mean square of the teacher's outputs in the row.
    """

    kind = "attention"

    def __init__(self, teacher: Teacher, choices: Choices, *, relative: bool = False) -> None:
        super().__init__(choices)
        if choices.trainable not in ("attention", "encoding"):
            raise ValueError(
                "trainable: expected 'attention' or 'encoding' where attention is matched, got "
                f"{choices.trainable!r}"
            )
        self.teacher, self.relative = teacher, relative

    def course(self) -> dict[str, Any]:
        return {**super().course(), "relative": self.relative}

    def prepare(
        self, model: nn.Module, recipe: Recipe, processes: Processes, dtype: torch.dtype
    ) -> None:
        super().prepare(model, recipe, processes, dtype)
        self.teacher.check_length(recipe.data.context_length)
        check_trunk(model, self.teacher.model)
        attach_teacher(model, self.teacher, processes.device, dtype)

    def flops(self, model: nn.Module, attention: int) -> ModelFlops:
        """The teacher's attention and the student's MLPs forward alone, no head; the student's
        attention forward and backward, without gradients of what it reads."""
        forward, backward = 0, 0
        for name, weight in linear_weights(cast(Any, model).model).items():
            forward += weight.numel()
            if is_attention(f".{name}"):
                backward += weight.numel() * weight.requires_grad
                backward += 0 if name.endswith(_READ_INPUT) else weight.numel()
        layers: Any = self.teacher.model.model.layers
        for layer in layers:
            forward += sum(w.numel() for w in linear_weights(layer.attention).values())
        return ModelFlops(2.0 * (forward + backward), (1 + 3) * attention)

    def loss(self, model: nn.Module, row: Row, divisor: float, device: torch.device) -> Tensor:
        errors, squares = model(row.input_ids.to(device), row.packing.to(device))
        if self.relative:
            errors = errors * (row.targets / squares)
        return errors.mean() / divisor


class MatchLogits(NextToken):
    """The divergence of the student's next-token distributions from the teacher's.

    Args:
        teacher: of the student; kept in the dtype of the run's products, spread as the student is.
        choices: as ever.
        temperature, top_k, chunk: as in `divergence`.
    """

    kind = "logits"

    def __init__(
        self,
        teacher: Teacher,
        choices: Choices,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(choices)
        self.teacher = teacher
        self.options = {"temperature": temperature, "top_k": top_k, "chunk": chunk}
        self._spread: Any = None
        self._teacher_flops = ModelFlops(0, 0)

    def course(self) -> dict[str, Any]:
        options = {name: self.options[name] for name in ("temperature", "top_k")}
        return {**super().course(), **options}

    def prepare(
        self, model: nn.Module, recipe: Recipe, processes: Processes, dtype: torch.dtype
    ) -> None:
        super().prepare(model, recipe, processes, dtype)
        self.teacher.check_length(recipe.data.context_length)
        teacher: Any = self.teacher.model
        teacher = teacher.to(processes.device, dtype).eval().requires_grad_(False)
        self._teacher_flops = forward_flops(teacher, attention_size(teacher.config))
        _replace(teacher, _hidden_and_head)
        if recipe.parallel == "fsdp" and processes.count > 1:
            teacher = spread(teacher, "fsdp", processes, dtype)
        self._spread = teacher
        _replace(model, _divergence)

    def flops(self, model: nn.Module, attention: int) -> ModelFlops:
        """The student's forward and backward, and the teacher's forward."""
        return super().flops(model, attention) + self._teacher_flops

    def loss(self, model: nn.Module, row: Row, divisor: float, device: torch.device) -> Tensor:
        ids, packing = row.input_ids.to(device), row.packing.to(device)
        targets = (row.labels[0, 1:] != IGNORED).nonzero()[:, 0].to(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            hidden, head = self._spread(ids, packing)
        found = model(ids, packing, targets, hidden[0, targets], head, self.options)
        return found / divisor


def check_trunk(student: nn.Module, teacher: nn.Module) -> None:
    """Raise ValueError unless everything but attention is the teacher's, up to its dtype."""
    theirs = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        if is_attention(name):
            continue
        other = theirs.get(name)
        if other is None or other.shape != parameter.shape:
            raise ValueError(f"teacher: expected the student's {name}, it has none of that shape")
        same = parameter.detach().to(other.dtype) == other.detach().to(parameter.device)
        if not same.all():
            raise ValueError(
                f"teacher: expected the student's {name}, which differs: match attention before "
                "anything else is trained"
            )


def attach_teacher(
    model: nn.Module, teacher: Teacher, device: torch.device, dtype: torch.dtype
) -> None:
    """Make `model(input_ids, packing)` give each layer's summed squared error of attention.

    Its forward then returns `[layers]` of them, Σ over tokens but documents' first of the mean over
    features, and the same of the teacher's outputs; float32.
    """
    blocks: Any = model.model.layers  # pyright: ignore
    for block, other in zip(blocks, teacher.model.model.layers, strict=True):
        attention: Any = other.attention
        attention = attention.to(device, dtype).eval().requires_grad_(False)
        object.__setattr__(block, "_teacher", attention)  # no part of the model: nothing saves it
        _replace(block, _attention_error)
    _replace(model, _attention_errors)


def _replace(module: nn.Module, forward: Any) -> None:
    module.forward = types.MethodType(forward, module)


def _attention_errors(self: Any, input_ids: Tensor, packing: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        x = self.model.embed_tokens(input_ids)
    positions = count_positions(input_ids, packing, None)
    found = []
    for layer in self.model.layers:
        x, *sums = layer(x, positions, input_ids, packing)
        found.append(torch.stack(sums))
    errors, squares = torch.stack(found, 1)
    return errors, squares.detach()


def _attention_error(
    self: Any, x: Tensor, positions: Tensor, token_ids: Tensor, packing: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's block output, its attention's summed squared error, and its own square."""
    seen = {"positions": positions, "token_ids": token_ids, "packing": packing}
    counted = (positions != 0)[..., None]
    with torch.no_grad():
        normed = self.attention_norm(x)
        given = normed.to(next(self._teacher.parameters()).dtype)
        target = self._teacher(given, **seen)
        target32 = target.float()
        square = (target32.square() * counted).mean(-1).sum()
    error = ((self.attention(normed, **seen).float() - target32).square() * counted).mean(-1).sum()
    with torch.no_grad():
        x = x + target
        x = x + self.mlp(self.mlp_norm(x))
    return x, error, square


def _hidden_and_head(self: Any, input_ids: Tensor, packing: Any) -> tuple[Tensor, Tensor]:
    hidden = self.model(input_ids=input_ids, packing=packing, use_cache=False).last_hidden_state
    return hidden, self.lm_head.weight


def _divergence(
    self: Any,
    input_ids: Tensor,
    packing: Any,
    targets: Tensor,
    hidden: Tensor,
    head: Tensor,
    options: dict[str, Any],
) -> Tensor:
    x = self.model(input_ids=input_ids, packing=packing, use_cache=False).last_hidden_state
    x = x[0, targets]
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return divergence(x, self.lm_head.weight, hidden, head, **options)
