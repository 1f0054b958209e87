"""What a run minimises, and on which parameters: next-token cross-entropy, unless told otherwise.

Distillation is another objective with the same loop: its checkpoints, processes, log and guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from path_attention.training.flops import ModelFlops, training_flops
from path_attention.training.processes import Processes
from path_attention.training.rows import Row

if TYPE_CHECKING:
    from path_attention.models import PathAttentionConfig
    from path_attention.training.recipe import Recipe


class Objective:
    """Next-token cross-entropy on all parameters; a subclass changes what it has to.

    A loss is a sum over a row's targets (`Row.targets` of them), divided by `divisor`, so that
    rows, passes and processes add up to the mean over a step's targets. Called in this order:
    `prepare` once, `begin_step` before each step, `loss` for each row, `exported` at the end.
    """

    def course(self) -> dict[str, Any]:
        """What the run's numbers hang on, flat and plain; a resume must have the same."""
        return {}

    @property
    def can_split(self) -> bool:
        """Whether `loss` takes a row that lies on several processes (`Row.split`): the one here
        does, another one does not unless it says so."""
        return type(self).loss is Objective.loss

    def prepare(
        self, model: nn.Module, recipe: Recipe, processes: Processes, dtype: torch.dtype
    ) -> None:
        """Once, with the whole model on the device, before it is compiled and spread."""

    def flops(self, model: nn.Module, attention: int) -> ModelFlops:
        """What `loss` and its backward pass compute; called once, after `prepare`.

        attention: `attention_size` of the model's configuration.
        """
        return training_flops(model, attention)

    def begin_step(self, step: int, steps: int) -> None:
        """Before step 0 ≤ step < steps; a resume calls it with where it stands."""

    def loss(self, model: nn.Module, row: Row, divisor: float, device: torch.device) -> Tensor:
        """The row's summed loss over `divisor`, float32, under autocast; `model` is spread.

        With `row.split` that of this process's tokens: the row's is the sum over its processes.
        """
        split = row.split
        if split is not None:
            return model(
                input_ids=split.take(row.input_ids).to(device),
                labels=split.targets(row.labels).to(device),
                split=split,
                num_items_in_batch=divisor,
                use_cache=False,
            ).loss
        input_ids, labels, packing = row.batch()
        return model(
            input_ids=input_ids.to(device),
            labels=labels.to(device),
            packing=None if packing is None else packing.to(device),
            num_items_in_batch=divisor,
            use_cache=False,
        ).loss

    def exported(
        self, config: PathAttentionConfig, state: dict[str, Tensor]
    ) -> tuple[PathAttentionConfig, dict[str, Tensor]]:
        """The configuration and whole state of the model that the run leaves."""
        return config, state
