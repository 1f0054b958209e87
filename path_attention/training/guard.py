"""Which steps are bad, by the rule that `GuardRecipe` states."""

from __future__ import annotations

import math
from statistics import median

from path_attention.training.recipe import GuardRecipe

_SMALLEST_DEVIATION = 0.01  # nats


class Guard:
    """Judges each step by its loss and its gradient's norm, the same on every process.

    Attributes:
        losses: of the last steps that were taken, oldest first; a resume goes on with them.
        bad: how many steps in a row were bad.
    """

    def __init__(self, recipe: GuardRecipe) -> None:
        self.recipe = recipe
        self.losses: list[float] = []
        self.bad = 0

    def fault(self, loss: float, norm: float) -> str | None:
        """What is wrong with a step, in words; None if nothing is, and it counts as taken."""
        found = self._fault(loss, norm)
        if found is not None:
            self.bad += 1
            return found
        self.bad = 0
        if self.recipe.spike is not None:
            self.losses = [*self.losses, loss][-self.recipe.window :]
        return None

    @property
    def stops(self) -> bool:
        """Whether a bad step ends the run."""
        return self.recipe.action == "stop" or self.bad >= self.recipe.most

    def state(self) -> dict[str, list[float] | int]:
        """For a checkpoint: plain values, exact in JSON."""
        return {"losses": list(self.losses), "bad": self.bad}

    def load(self, state: dict) -> None:
        """Go on from a checkpoint's."""
        self.losses, self.bad = list(state["losses"]), state["bad"]

    def _fault(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        spike, before = self.recipe.spike, self.losses
        if spike is None or len(before) < self.recipe.window:
            return None
        middle = median(before)
        spread = 1.4826 * median(abs(x - middle) for x in before)
        deviation = max(spread, _SMALLEST_DEVIATION)
        if loss <= middle + spike * deviation:
            return None
        return (
            f"the loss is {loss:.4f}, {(loss - middle) / deviation:.1f} deviations above the "
            f"median {middle:.4f} of the {len(before)} steps before"
        )
