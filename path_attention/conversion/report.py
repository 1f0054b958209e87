"""What a conversion did: each layer's error, divergence, perplexity, before and after each stage.

All on the same held-out tokens. A layer's error is the student's attention against the teacher's on
the teacher's activations, divided by the teacher's mean square: 0 is the same, 1 is no better than
no attention at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from path_attention.conversion.divergence import divergence
from path_attention.conversion.objectives import attach_teacher, check_trunk
from path_attention.conversion.recipe import ConversionRecipe
from path_attention.conversion.teacher import Teacher
from path_attention.models import PathAttentionForCausalLM, load_model
from path_attention.results import make_result, write_result
from path_attention.training.mixture import CorpusMixture, pack_rows
from path_attention.training.processes import choose_precision
from path_attention.training.rows import IGNORED, Row


class Measurer:
    """Measures students against one teacher on one set of held-out rows.

    Args:
        teacher: of the students.
        recipe: of the conversion: its data, its context, its precision.
        device: where.
    """

    def __init__(self, teacher: Teacher, recipe: ConversionRecipe, device: torch.device) -> None:
        self.teacher, self.device = teacher, device
        self.dtype = choose_precision(recipe.precision, device)
        mixture = CorpusMixture.open(recipe.data)
        context = recipe.report.context
        if teacher.window is not None:
            context = min(context, teacher.window)
        row = min(max(context, 4096), mixture.info["heldout_tokens"])
        rows = pack_rows(
            mixture, "heldout", context_length=min(context, row), row_tokens=row, seed=0
        )
        count = max(1, min(recipe.report.tokens, rows.epoch_tokens) // row)
        self.rows = [rows.row(number) for number in range(count)]

    @torch.no_grad()
    def measure(self, folder: Path, name: str, tokens: int) -> list[dict[str, Any]]:
        """Rows of a report on the model in `folder`, trained on so many tokens.

        One row by "model" (its divergence and perplexity, and the teacher's), and one by "layer"
        for each layer while the student's other weights are the teacher's.
        """
        student = cast(PathAttentionForCausalLM, load_model(folder))
        student = cast(Any, student).to(self.device).eval()
        teacher: Any = self.teacher.model
        teacher = teacher.to(self.device).eval()
        sums = torch.zeros(3, dtype=torch.float64)
        targets = 0
        for row in self.rows:
            sums += self._compare(student, teacher, row)
            targets += row.targets
        kl, ours, theirs = (sums / targets).tolist()
        rows: list[dict[str, Any]] = [
            {
                "by": "model",
                "stage": name,
                "tokens": tokens,
                "layer": None,
                "error": None,
                "kl": kl,
                "perplexity": math.exp(ours),
                "teacher_perplexity": math.exp(theirs),
                "targets": targets,
            }
        ]
        errors = self._errors(student)
        for layer, error in enumerate(errors):
            empty = dict.fromkeys(("kl", "perplexity", "teacher_perplexity"))
            row = {"by": "layer", "stage": name, "tokens": tokens, "layer": layer, "error": error}
            rows.append({**row, **empty, "targets": targets})
        return rows

    def _compare(self, student: Any, teacher: Any, row: Row) -> Tensor:
        """Sums over the row's targets: KL, the student's and the teacher's cross-entropy."""
        ids, packing = row.input_ids.to(self.device), row.packing.to(self.device)
        labels = row.labels[0, 1:].to(self.device)
        places = (labels != IGNORED).nonzero()[:, 0]
        hidden, losses = [], []
        for model in (student, teacher):
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16
            ):
                inputs = {"input_ids": ids, "packing": packing, "use_cache": False}
                x = model.model(**inputs).last_hidden_state[0, places].float()
            hidden.append(x)
            losses.append(_cross_entropy(x, model.lm_head.weight, labels[places]))
        kl = divergence(hidden[0], student.lm_head.weight, hidden[1], teacher.lm_head.weight)
        return torch.stack([kl, *losses]).double().cpu()

    def _errors(self, student: Any) -> list[float]:
        try:
            check_trunk(student, self.teacher.model)
        except ValueError:
            return []  # trained beyond its attention: layers no longer see what the teacher's see
        attach_teacher(cast(nn.Module, student), self.teacher, self.device, torch.float32)
        errors, squares = 0.0, 0.0
        for row in self.rows:
            error, square = student(row.input_ids.to(self.device), row.packing.to(self.device))
            errors, squares = errors + error.double(), squares + square.double()
        return (errors / squares).tolist()  # pyright: ignore


def _cross_entropy(x: Tensor, head: Tensor, labels: Tensor, rows: int = 512) -> Tensor:
    total = torch.zeros((), device=x.device)
    for part, wanted in zip(x.split(rows), labels.split(rows), strict=True):
        total += nn.functional.cross_entropy(part @ head.float().T, wanted, reduction="sum")
    return total


def write_report(out: Path, rows: Sequence[Mapping[str, Any]], device: str = "cpu") -> None:
    """report.json, in the form of results; report.png if the stages were measured."""
    from path_attention.conversion.figure import draw

    result = make_result(
        what="A converted model against its teacher on the same held-out tokens: each layer's "
        "relative squared error of attention, divergence in nats a token, perplexity; then both "
        "models' perplexity by tokens of context and scores of suites, with 95 % intervals",
        rows=rows,
        device=device,
    )
    write_result(out / "report.json", result)
    if any(row["by"] == "model" for row in rows):
        draw(result, out / "report.png")
