"""The command `path-attention benchmark accuracy`: errors in units of one rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from path_attention.benchmarks.activations import (
    activations_of,
    load_activations,
    save_activations,
)
from path_attention.benchmarks.candidates import DEFINITION, ENCODINGS, Candidate
from path_attention.benchmarks.comparison import (
    Choice,
    Report,
    at_least,
    choose,
    name_of,
    numbers,
    pick_device,
    pick_dtype,
    publish,
    run_peer,
    say,
    set_threads,
    shapes,
    words,
)
from path_attention.benchmarks.inputs import (
    CASES,
    Inputs,
    make_inputs,
    names_used_by,
    swapped_inputs,
)
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.benchmarks.measure import Job

RESULTS = ("out", "dq", "dk", "dv", "dw", "dbeta", "dlog_forget")
_AT_ONCE = 2**30  # T² · D · query heads of the definition: about 10 GiB with its gradients


@dataclass(frozen=True, kw_only=True)
class BenchmarkAccuracy:
    """Errors of the operator and of peers, out and every gradient, against the definition.

    The definition is taken in float64 on the same rounded inputs. An error's unit is what rounding
    the exact result to DTYPE costs: ‖x − exact‖ / ‖round(exact) − exact‖. Cases: random inputs,
    hard ones, and the activations of a trained model. Then swaps: β = 2 and w = (e_a − e_b)/√2, so
    that each query finds one key if every factor on the way is exact, and the share that do.
    Writes OUT.json and OUT.png and prints both tables.
    """

    tokens: int = 2048
    """Length of the one sequence (activations: at most)."""
    swap_tokens: str = "4096,16384,65536"
    """Lengths of the swaps, with commas between; empty for none."""
    shapes: str = "2x64,2x128"
    """Heads x head size, with commas between."""
    cases: str = ",".join(CASES)
    """Cases of inputs made here, with commas between; empty for none."""
    encodings: str = "path,path_fox,fox"
    """Of path, path_fox, fox, nope, alibi, with commas between."""
    candidates: str = ""
    """Names with commas between; empty for all that run here."""
    model: Path | None = None
    """Folder of a run or of a model, whose activations on TEXT are a case for each layer."""
    text: Path | None = None
    """What the model reads: a file in UTF-8."""
    activations: Path | None = None
    """Activations that were saved, in the place of MODEL and TEXT."""
    save_activations: Path | None = None
    """Where to save the model's activations, for a machine without it (safetensors)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of q, k, v and of the unit; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    threads: int = 0
    """Threads on the CPU; 0 is torch's own choice."""
    out: Path = Path("results/accuracy")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        set_threads(self.threads)
        dtype = pick_dtype(self.dtype, device)
        kept = kept_for(self, device, say, (self.model, self.text, self.activations))
        result = publish(
            self,
            "accuracy",
            what="Errors of attention's output and gradients against the definition in float64, in "
            f"units of what rounding the exact result to {name_of(dtype)} costs (null: not "
            "computed, or where finite is false, not finite); and over swaps, the share of queries "
            "whose argmax is the definition's",
            rows=self.measure(device, dtype, say, kept.rows),
            device=device,
            draw=_draw,
        )
        kept.delete()
        swaps = [row for row in result["rows"] if "found" in row]
        errors = [row for row in result["rows"] if "found" not in row]
        print_rows(result, ("size", "case", "candidate", "encoding", *RESULTS), errors)
        print_rows(result, ("size", "tokens", "candidate", "found"), swaps)

    def measure(
        self, device: torch.device, dtype: torch.dtype, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options."""
        at_least(self, tokens=1, threads=0)
        chosen = choose(device, self.encodings, self.candidates)
        all_shapes = shapes(self.shapes)
        swap_tokens = numbers("swap_tokens", self.swap_tokens) if self.swap_tokens else []
        rows = []
        for case, encodings, inputs in self._cases(all_shapes, device):
            for encoding in encodings:
                unit = f"{case}, {inputs.q.shape[2]} heads of {inputs.q.shape[3]}, {encoding}"
                rows += keep(
                    unit, partial(_errors, case, encoding, inputs.rounded(dtype), chosen, report)
                )
        for heads, size in all_shapes:
            for T in swap_tokens:
                shape = (T, heads, heads, size, dtype, device)
                unit = f"swaps, T {T}, {heads} heads of {size}"
                rows += keep(unit, partial(_swaps, shape, chosen, report))
        if not rows:
            raise ValueError("cases: expected any, or swap_tokens, or activations, got none")
        return rows

    def _cases(
        self, all_shapes: list[tuple[int, int]], device: torch.device
    ) -> Iterator[tuple[str, list[str], Inputs]]:
        """Names of cases, the encodings that they concern, and their inputs before rounding."""
        layers = self._activations(device)
        for name in words("cases", self.cases, list(CASES)) if self.cases else []:
            concerned = [e for e in ENCODINGS if CASES[name].concerns in names_used_by(e)]
            for heads, size in all_shapes:
                shape = (1, self.tokens, heads, heads, size, torch.float32, device)
                yield name, concerned, CASES[name].change(make_inputs(*shape))
        for n, inputs in enumerate(layers):
            first = inputs.leaves(lambda x: x[:1, : self.tokens])
            yield f"layer_{n}", [inputs.encoding], first

    def _activations(self, device: torch.device) -> list[Inputs]:
        if self.activations is not None:
            if self.model is not None:
                raise ValueError("model: expected none beside activations, got both")
            return load_activations(self.activations, device)
        if (self.model is None) != (self.text is None):
            given, missing = ("text", "model") if self.model is None else ("model", "text")
            raise ValueError(f"{missing}: expected together with {given}, got none")
        if self.model is None or self.text is None:
            if self.save_activations is not None:
                raise ValueError("save_activations: expected a model and a text, got none")
            return []
        layers = activations_of(self.model, self.text, self.tokens, device)
        if self.save_activations is not None:
            save_activations(self.save_activations, layers)
        return layers


def _errors(
    case: str, encoding: str, x: Inputs, chosen: list[Choice], report: Report
) -> Iterator[dict[str, Any]]:
    """A row for each candidate that computes this encoding."""
    asked = [c for c, e in chosen if e == encoding]
    if not asked:
        return
    (_, T, HQ, D), DV, dtype = x.q.shape, x.v.shape[3], x.q.dtype
    rng = torch.Generator(x.q.device).manual_seed(2)
    grad_out = torch.randn(1, T, HQ, DV, generator=rng, device=x.q.device).to(dtype)
    exact = exact_results(x, encoding, grad_out)
    names = ("out", *(f"d{name}" for name in names_used_by(encoding)))
    for candidate in asked:

        def results(candidate: Candidate = candidate) -> tuple[Tensor, ...]:
            out, grads = Job(candidate.make(x, encoding), x.used_by(encoding), grad_out).run()
            return out, *grads

        got = run_peer(candidate, encoding, results, report)
        if got is None:
            continue
        values = {n: roundings(g, y, dtype) for n, g, y in zip(names, got, exact, strict=True)}
        report(f"{case}, size {D}: {candidate.name} {encoding}: {_shown(values)}")
        yield {
            "case": case,
            "candidate": candidate.name,
            "encoding": encoding,
            "tokens": T,
            "heads": HQ,
            "size": D,
            "dtype": name_of(dtype),
            "finite": all(bool(g.isfinite().all()) for g in got),
            **{name: values.get(name) for name in RESULTS},
        }


def exact_results(x: Inputs, encoding: str, grad_out: Tensor) -> list[Tensor]:
    """Output and gradients of the definition in float64, some key heads at a time."""
    (_, T, HQ, D), H = x.q.shape, x.k.shape[2]
    G = HQ // H
    step = max(1, _AT_ONCE // (T * T * D * G))
    parts = []
    for h in range(0, H, step):
        of_keys, of_queries = slice(h, h + step), slice(h * G, (h + step) * G)
        heads = (of_queries, *(of_keys,) * 4, of_queries)
        taken = (None if y is None else y[:, :, own] for y, own in zip(x[:6], heads, strict=True))
        part = Inputs(*taken, scale=x.scale).leaves(Tensor.double)  # type: ignore[arg-type]
        above = grad_out[:, :, of_queries].double()
        out, grads = Job(DEFINITION.make(part, encoding), part.used_by(encoding), above).run()
        parts.append((out.detach(), *grads))
    return [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]


def roundings(got: Tensor, exact: Tensor, dtype: torch.dtype) -> float | None:
    """‖got − exact‖ / ‖round(exact) − exact‖; None if it is not finite or nothing is rounded."""
    unit = (exact.to(dtype).double() - exact).norm()
    error = (got.double() - exact).norm() / unit
    return float(f"{error.item():.3g}") if error.isfinite() else None


def _swaps(
    shape: tuple[int, int, int, int, torch.dtype, torch.device],
    chosen: list[Choice],
    report: Report,
) -> Iterator[dict[str, Any]]:
    """A row for each candidate that transports: the share of queries that find their key."""
    x, target = swapped_inputs(*shape)
    _, T, heads, D = x.q.shape
    wanted = x.v.gather(1, target[..., None].expand_as(x.v)).sign()
    for candidate in [c for c, e in chosen if e == "path"]:

        def found(candidate: Candidate = candidate) -> float:
            with torch.no_grad():
                out = candidate.make(x, "path")()
            return (out.sign() == wanted).all(-1).double().mean().item()

        share = run_peer(candidate, "path", found, report)
        if share is None:
            continue
        report(f"swaps, T {T}, size {D}: {candidate.name}: {share:.6f}")
        yield {
            "case": "swaps",
            "candidate": candidate.name,
            "encoding": "path",
            "tokens": T,
            "heads": heads,
            "size": D,
            "dtype": name_of(x.q.dtype),
            "found": share,
        }


def _shown(values: Mapping[str, float | None]) -> str:
    return " ".join(f"{name} {'–' if v is None else f'{v:g}'}" for name, v in values.items())


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """Each case's largest error over encodings and tensors, a panel a head size; and the swaps."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    bars: dict[int, dict[tuple[str, str], float | None]] = {}
    found: dict[tuple[str, str], float | None] = {}
    for row in result["rows"]:
        if "found" in row:
            found[row["candidate"], f"{row['tokens']:,}, size {row['size']}"] = row["found"]
            continue
        own, key = bars.setdefault(row["size"], {}), (row["candidate"], row["case"])
        errors = [row[name] for name in RESULTS if row[name] is not None]
        worst = max(errors, default=None) if row["finite"] else math.inf
        own[key] = max((x for x in (worst, own.get(key)) if x is not None), default=None)
    label = "largest error, in roundings"
    panels = [Panel(f"head size {size}", label, own, True) for size, own in bars.items()]
    if found:
        panels.append(Panel("swaps", "share of queries with the right key", found))
    draw_bars(panels, f"Errors against the definition, {result['device']}", path)
