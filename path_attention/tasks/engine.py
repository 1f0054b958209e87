"""Training of replicas on a task: between two checks no step waits for the host.

A step draws its sequences on the device, and its random numbers, rate and curriculum hang on
nothing but tensors there. On a GPU it is one CUDA graph, replayed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from path_attention.models import PathAttentionForCausalLM
from path_attention.tasks.measure import Counts, is_solved, losses, measure
from path_attention.tasks.optimizer import ReplicatedAdamW
from path_attention.tasks.recipe import TaskRecipe
from path_attention.tasks.replicas import Replicas
from path_attention.tasks.task import IGNORED, start_seed, train_generator

Say = Callable[[str], None]


@dataclass
class Outcome:
    """How one run went.

    Attributes:
        recipe: of the run.
        curve: a flat row for each check: step, loss since the last one, and for every check's test
            its errors and what was counted.
        tests: counts on the task's tests, at the end.
        step: steps that this run took.
        solved: the last check called it solved.
        first_solved: the first step whose check did; None if none did.
        finite: False if a gradient was not finite; the run ended there.
    """

    recipe: TaskRecipe
    curve: list[dict[str, Any]] = field(default_factory=list)
    tests: list[Counts] = field(default_factory=list)
    step: int = 0
    solved: bool = False
    first_solved: int | None = None
    finite: bool = True


class Engine:
    """Trains recipes of one shape as replicas of one batched model.

    Args:
        recipes: of one `TaskRecipe.shape`.
        device: where.
        compile: run forward and backward through `torch.compile`.
        graph: replay each step as a CUDA graph; None does where the device is a GPU.

    Raises:
        ValueError: on recipes of several shapes, or a graph where there is no GPU.
    """

    def __init__(
        self,
        recipes: Sequence[TaskRecipe],
        *,
        device: str = "cpu",
        compile: bool = False,
        graph: bool | None = None,
    ) -> None:
        if len({recipe.shape for recipe in recipes}) != 1:
            found = sorted({recipe.shape for recipe in recipes})
            raise ValueError(f"recipes: expected recipes of one shape, got {found}")
        self.device = torch.device(device)
        self.graphed = self.device.type == "cuda" if graph is None else graph
        if self.graphed and self.device.type != "cuda":
            raise ValueError(f"graph: expected False on {device}, got True")
        self.recipes, self.recipe, self.task = recipes, recipes[0], recipes[0].task
        R, recipe = len(recipes), recipes[0]
        self.dtype = torch.bfloat16 if recipe.precision == "bfloat16" else None
        self.replicas = Replicas([start_model(r) for r in recipes], self.device)
        self.optimizer = ReplicatedAdamW(
            self.replicas,
            rates=[r.learning_rate for r in recipes],
            decays=[r.weight_decay for r in recipes],
            shares=[recipe.share(step) for step in range(recipe.steps)],
            betas=recipe.betas,
            eps=recipe.eps,
            clip=recipe.clip,
        )
        self.generators = [train_generator(r.seed, self.device) for r in recipes]
        self.u = torch.zeros(R, recipe.batch, self.task.uniforms, device=self.device)
        self.loss_sum = torch.zeros(R, device=self.device)
        self.outcomes = [Outcome(r) for r in recipes]
        self.in_a_row = [0] * R
        self.step = 0
        self.seconds = 0.0
        self._logits = torch.compile(self.replicas.logits) if compile else self.replicas.logits
        self._advance: Callable[[], None] | None = None

    def run(self, checkpoint: Path | None = None, say: Say | None = None) -> list[Outcome]:
        """Train to the end, from the checkpoint if there is one, and measure.

        Args:
            checkpoint: written after every check, and removed by nobody here.
            say: told a line after every check.

        Raises:
            ValueError: the checkpoint is of other runs.
        """
        if checkpoint is not None and checkpoint.exists():
            self.load(checkpoint)
        while self.step < self.recipe.steps and any(self.optimizer.active.tolist()):
            self.train(min(self.recipe.check_every, self.recipe.steps - self.step))
            self.check()
            if checkpoint is not None:
                self.save(checkpoint)
            if say is not None:
                say(self._line())
        counts = measure(self.replicas, self.task.tests(), self.dtype)
        for outcome, of_run in zip(self.outcomes, counts, strict=True):
            outcome.tests = of_run
        return self.outcomes

    def train(self, steps: int) -> None:
        """Take this many steps."""
        if self._advance is None:
            self._advance = self._captured() if self.graphed else self._take_step
        self._wait()
        before = time.perf_counter()
        for _ in range(steps):
            self._advance()
        self._wait()
        self.seconds += time.perf_counter() - before
        self.step += steps

    def check(self) -> None:
        """Measure every replica on the task's checks, note it, and end those that are done."""
        since = self.step - (self.outcomes[0].curve[-1]["step"] if self.outcomes[0].curve else 0)
        active, finite = self.optimizer.active.tolist(), self.optimizer.finite.tolist()
        mean = (self.loss_sum / max(since, 1)).tolist()
        self.loss_sum.zero_()
        counts = measure(self.replicas, self.task.checks(), self.dtype)
        for r, (outcome, found) in enumerate(zip(self.outcomes, counts, strict=True)):
            running = outcome.finite and (not outcome.curve or outcome.curve[-1]["running"])
            if running:
                outcome.finite = finite[r]
                outcome.step = self.step
                outcome.solved = is_solved(self.task, found)
                self.in_a_row[r] = self.in_a_row[r] + 1 if outcome.solved else 0
                if outcome.solved and outcome.first_solved is None:
                    outcome.first_solved = self.step
                stop = self.recipe.stop_after
                running = active[r] and not (stop is not None and self.in_a_row[r] >= stop)
            row: dict[str, Any] = {"step": self.step, "running": running, "loss": None}
            if mean[r] == mean[r] and abs(mean[r]) != float("inf"):
                row["loss"] = mean[r]
            for c in found:
                row[f"{c.test}.errors"], row[f"{c.test}.counted"] = sum(c.errors), sum(c.counted)
                row[f"{c.test}.hardest"] = c.hardest_share
            outcome.curve.append(row)
            if not running:
                self.optimizer.active[r] = False

    def save(self, path: Path) -> None:
        """Write everything that a resume needs, whole or not at all."""
        state = {
            "runs": [recipe.run for recipe in self.recipes],
            "optimizer": self.optimizer.state,
            "generators": [generator.get_state() for generator in self.generators],
            "loss_sum": self.loss_sum,
            "step": self.step,
            "seconds": self.seconds,
            "in_a_row": self.in_a_row,
            "outcomes": [
                (o.curve, o.step, o.solved, o.first_solved, o.finite) for o in self.outcomes
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Go back to what `save` wrote. Raises ValueError if it is of other runs."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        runs = [recipe.run for recipe in self.recipes]
        if state["runs"] != runs:
            raise ValueError(f"checkpoint: {path.name} is of {state['runs']}, expected {runs}")
        for name, tensor in self.optimizer.state.items():
            tensor.copy_(state["optimizer"][name])
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved.cpu())
        self.loss_sum.copy_(state["loss_sum"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.in_a_row = state["in_a_row"]
        for outcome, saved in zip(self.outcomes, state["outcomes"], strict=True):
            outcome.curve, outcome.step, outcome.solved = saved[:3]
            outcome.first_solved, outcome.finite = saved[3:]

    def model(self, replica: int) -> PathAttentionForCausalLM:
        """A replica as a model of its own, on the CPU."""
        model = PathAttentionForCausalLM(self.recipes[replica].model_config())
        model.load_state_dict(self.replicas.state_dict(replica))
        return model

    def _take_step(self) -> None:
        for u, generator in zip(self.u, self.generators, strict=True):
            torch.rand(u.shape, generator=generator, out=u)
        batch = self.task.build(self.u.flatten(0, 1), self._longest())
        # No cache of cast weights: in a graph it would outlive the step that filled it.
        with torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype is not None, cache_enabled=False
        ):
            logits = self._logits(batch.tokens)
        loss = losses(logits, batch.labels, self.replicas.count, IGNORED)
        gradients = torch.autograd.grad(loss.sum(), self.replicas.parameters)
        for view, gradient in zip(self.replicas.gradients, gradients, strict=True):
            view.copy_(gradient)
        self.optimizer.step()
        self.loss_sum.add_(loss.detach())

    def _longest(self) -> Tensor | None:
        """The curriculum's longest target at this step, on the device."""
        if not self.recipe.curriculum_steps or self.task.curriculum is None:
            return None
        low, high = self.task.curriculum
        grown = (high - low + 1) * self.optimizer.step_count // self.recipe.curriculum_steps
        return (low + grown).clamp(max=high)

    def _captured(self) -> Callable[[], None]:
        """The step as a CUDA graph, the state left as it was."""
        state = [*self.optimizer.state.values(), self.loss_sum]
        kept = [x.clone() for x in state]
        draws = [generator.get_state() for generator in self.generators]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for _ in range(3):
                self._take_step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for x, before in zip(state, kept, strict=True):
            x.copy_(before)
        graph = torch.cuda.CUDAGraph()
        for generator, before in zip(self.generators, draws, strict=True):
            generator.set_state(before)
            graph.register_generator_state(generator)
        with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=stream):
            self._take_step()
        return graph.replay

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _line(self) -> str:
        rows = [outcome.curve[-1] for outcome in self.outcomes]
        solved = sum(outcome.solved for outcome in self.outcomes)
        shown = [f"step {self.step}/{self.recipe.steps}", f"solved {solved}/{len(rows)}"]
        known = [row["loss"] for row in rows if row["running"] and row["loss"] is not None]
        if known:
            shown.append(f"loss {min(known):.2g} to {max(known):.2g}")
        for name in (test.name for test in self.task.checks()):
            share = [row[f"{name}.errors"] / max(row[f"{name}.counted"], 1) for row in rows]
            if self.task.hardest_only:
                share = [row[f"{name}.hardest"] for row in rows]
            shown.append(f"{name} errors {min(share):.2%} to {max(share):.2%}")
        return f"{self.recipe.task.name} {self.recipe.encoding}: " + ", ".join(shown)


def start_model(recipe: TaskRecipe) -> PathAttentionForCausalLM:
    """The model of a recipe at its start, on the CPU; the caller's randomness is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(start_seed(recipe.seed))
        return PathAttentionForCausalLM(recipe.model_config())
