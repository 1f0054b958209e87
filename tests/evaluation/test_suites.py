"""Suites from a shell: scores are lm-eval's own, whatever the batch, and after a kill."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytest.importorskip("lm_eval")

import datasets
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from path_attention import cli
from path_attention.evaluation.harness import data, language_model, suites
from path_attention.evaluation.harness.code_tasks import CODE_TASKS
from path_attention.evaluation.harness.texts import TEXTS
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.models.loading import load_model, load_tokenizer
from path_attention.results import read_result
from path_attention.training.corpus import build_corpus

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = [a + v + b for a in "bdk" for v in "aeiou" for b in "lmt"]
CONTEXT = 200  # tokens, so that WikiText's documents take several windows
PG19 = TEXTS["pg19"]


def sentence(rng: random.Random, words: int = 8) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def rows_of_zero_shot() -> dict[tuple[str, str | None], dict[str, list[dict]]]:
    """Data sets of zero_shot's form, made up."""
    rng = random.Random(0)
    n = range(6)
    odd = "\u2028\u0085 \r"  # ends of lines to some, and not to JSON
    texts = [sentence(rng, 2) + odd for _ in range(4)]
    choices = {"text": texts, "label": list("ABCD")}
    arc = [{"question": sentence(rng), "choices": choices, "answerKey": "C"} for _ in n]
    piqa = [
        {"goal": sentence(rng), "sol1": sentence(rng), "sol2": sentence(rng), "label": i % 2}
        for i in n
    ]
    hella = [
        {
            "activity_label": "Walking",
            "ctx_a": sentence(rng),
            "ctx_b": "he",
            "endings": [sentence(rng) for _ in range(4)],
            "label": str(i % 4),
        }
        for i in n
    ]
    wino = [
        {"sentence": f"{sentence(rng)} _ {sentence(rng)}", "option1": "a", "option2": "b"}
        | {"answer": str(1 + i % 2)}
        for i in n
    ]
    wiki = [{"page": f" = Title = \n {sentence(rng, 150)} @-@ {sentence(rng)} \n"} for _ in n]
    return {
        ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): dict.fromkeys(
            ("train", "test"), wiki
        ),
        ("EleutherAI/lambada_openai", "default"): {"test": [{"text": sentence(rng)} for _ in n]},
        ("baber/piqa", None): {"train": piqa, "validation": piqa},
        ("Rowan/hellaswag", None): {"train": hella, "validation": hella},
        ("allenai/winogrande", "winogrande_xl"): {"train": wino, "validation": wino},
        ("allenai/ai2_arc", "ARC-Easy"): {"train": arc, "validation": arc, "test": arc},
        ("allenai/ai2_arc", "ARC-Challenge"): {"train": arc, "validation": arc, "test": arc},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suites")
    rng = random.Random(1)
    text = " ".join(f"{sentence(rng).capitalize()}." for _ in range(400))
    (folder / "text.txt").write_text(text)
    corpus = build_corpus(
        str(folder / "text.txt"), folder / "corpus", vocab_size=300, heldout_fraction=0.0,
        progress=False,
    )  # fmt: skip
    tokenizer = corpus.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    torch.manual_seed(0)
    sizes = {"vocab_size": corpus.vocab_size, "intermediate_size": 32, **SIZES}
    shared = {"max_position_embeddings": CONTEXT, "initializer_range": 0.2, **sizes}
    for name, model in {
        "path": PathAttentionForCausalLM(PathAttentionConfig.from_preset("path", **shared)),
        "llama": LlamaForCausalLM(LlamaConfig(**shared)),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `evaluate fetch` writes it, from data sets that a stand-in for the hub has."""
    target = tmp_path_factory.mktemp("data")
    hub = rows_of_zero_shot()

    def load(path: str, name: str | None = None, **kwargs: object):
        found = hub[path, name]
        return datasets.DatasetDict({s: datasets.Dataset.from_list(r) for s, r in found.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_FROM_HUB", load)
        patch.setattr(data, "ROWS", {})
        cli.main(["evaluate", "fetch", "zero_shot", "--data-dir", str(target)])
    return target


def evaluate(suite: str, out: Path, *options: str) -> list[dict]:
    cli.main(["evaluate", suite, "--out", str(out), "--device", "cpu", *options])
    return read_result(out / f"{suite}.json")["rows"]


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    return lines[0]


def scores(rows: list[dict]) -> dict[tuple, float]:
    return {(r["model"], r["column"], r["length"], r["metric"]): r["score"] for r in rows}


def test_zero_shot_is_lm_evals_own(folder, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ROWS", {})
    both = [str(folder / "llama"), str(folder / "path")]
    both += ["--data-dir", str(data_dir)]
    rows = evaluate("zero_shot", tmp_path, *both, "--batch-size", "16")
    whole, calls = language_model.log_likelihoods, []

    def dies(*arguments):
        if len(calls) == 30:
            raise KeyboardInterrupt
        calls.append(1)
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(language_model, "log_likelihoods", dies)
        with pytest.raises(SystemExit):
            evaluate("zero_shot", tmp_path / "alone", *both, "--batch-size", "1")
    alone = evaluate("zero_shot", tmp_path / "alone", *both, "--batch-size", "1")  # goes on
    kept, straight = (
        (tmp_path / name / "llama" / "answers.jsonl").read_text().splitlines()
        for name in ("alone", ".")
    )
    assert 30 < len(kept) <= len(straight)  # what was answered is not asked again
    rounded = scores(alone).items()  # sums of likelihoods, to a few roundings of a float32 logit
    assert dict(rounded) == {key: pytest.approx(v, rel=1e-5) for key, v in scores(rows).items()}
    assert {row["model"] for row in rows} == {"llama", "path"}
    wikitext = next(row for row in rows if row["column"] == "wikitext")
    assert wikitext["context"] == wikitext["longest"] == CONTEXT and wikitext["cut"] == 0
    load, manager = data.loader(data_dir), suites.task_manager()
    for name in ("llama", "path"):
        model = load_model(folder / name, dtype=torch.float32)
        plan = suites.zero_shot(suites.Sources(load=load, count_tokens=len))
        theirs: dict = {}
        for rolling in (True, False):  # where texts are rolled over, it scores their start too
            bos = {"add_bos_token": False} if rolling else {}
            own = HFLM(pretrained=model, tokenizer=load_tokenizer(folder / name), **bos)
            tasks = [p.task for p in plan if (p.name == "wikitext") == rolling]
            theirs |= simple_evaluate(own, tasks=tasks, task_manager=manager, bootstrap_iters=0)[
                "results"
            ]
        mine = scores([row for row in rows if row["model"] == name])
        for planned in plan:
            for metric in planned.metrics or ():
                expected = theirs[planned.name][f"{metric},none"]
                found = mine[name, planned.column, None, metric]
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), planned.name
    mean = next(row for row in rows if row["metric"] == "mean")
    assert mean["column"] == "mean of 6" and mean["low"] < mean["score"] < mean["high"]


def test_lm_eval_makes_our_model_by_its_name(folder, data_dir, monkeypatch):
    monkeypatch.setattr(data, "ROWS", {})
    with data.tasks_load_by(data.loader(data_dir)):
        asked = {"tasks": ["piqa"], "task_manager": suites.task_manager(), "bootstrap_iters": 0}
        words = f"pretrained={folder / 'path'},piece=64"
        found, same = (
            simple_evaluate("path_attention", args, device="cpu", batch_size=rows, **asked)[
                "results"
            ]
            for args, rows in ((words, "auto"), ({"pretrained": str(folder / "path")}, 2))
        )
    assert found["piqa"]["acc,none"] == same["piqa"]["acc,none"]
    lm = language_model.CausalLM.create_from_arg_string(words, {"device": "cpu", "batch_size": 3})
    assert (lm.context, lm.piece, lm.batch_size_found.rows) == (CONTEXT, 64, 3)
    with pytest.raises(ValueError, match="pretrained: expected a model's folder, got {'piece': 3}"):
        language_model.CausalLM.create_from_arg_string("piece=3")


def test_batch_piece_and_a_kill_change_nothing(folder, tmp_path, monkeypatch, capsys):
    words = [str(folder / "path"), str(folder / "llama"), "--background", str(folder / "text.txt")]
    words += ["--lengths", "1200,1500", "--samples", "2", "--tasks", "qa1", "qa4"]
    first = evaluate("babilong", tmp_path / "a", *words, "--batch-size", "1")
    second = evaluate("babilong", tmp_path / "b", *words, "--batch-size", "16", "--piece", "64")
    assert first == second and len(first) == 8

    def texts(out: Path) -> list[str]:
        return [(out / name / "babilong.samples.jsonl").read_text() for name in ("path", "llama")]

    assert texts(tmp_path / "a") == texts(tmp_path / "b")
    line = json.loads(texts(tmp_path / "a")[0].splitlines()[0])
    assert line["prompt"].endswith("?\nAnswer:") and set(line["scores"]) == {"score"}

    whole, calls = language_model.greedy_answers, []

    def dies(model, prompts, *rest):
        if len(calls) == 3:  # in the first model's last task
            raise KeyboardInterrupt
        calls.append(len(prompts))
        return whole(model, prompts, *rest)

    monkeypatch.setattr(language_model, "greedy_answers", dies)
    with pytest.raises(SystemExit) as stopped:
        evaluate("babilong", tmp_path / "c", *words, "--batch-size", "2")
    assert stopped.value.code == 130 and not (tmp_path / "c" / "babilong.json").exists()
    kept = tmp_path / "c" / "path" / "answers.jsonl"
    with kept.open("a") as file:
        file.write('{"key": "cut off by a ki')
    done = calls[:]
    calls.clear()
    calls.extend([0] * 4)  # past the one that dies
    assert evaluate("babilong", tmp_path / "c", *words, "--batch-size", "2") == first
    assert sum(done) + sum(calls) == 16  # nothing is asked twice
    assert texts(tmp_path / "c") == texts(tmp_path / "a")
    capsys.readouterr()
    torch.manual_seed(5)
    other = PathAttentionForCausalLM(load_model(folder / "path").config)
    other.save_pretrained(tmp_path / "path")
    load_tokenizer(folder / "path").save_pretrained(tmp_path / "path")
    words[0] = str(tmp_path / "path")
    message = failure(capsys, "evaluate", "babilong", *words, "--out", str(tmp_path / "c"))
    assert "was made with other weights" in message


def test_generated_suites_at_given_lengths(folder, tmp_path):
    background = ("--background", str(folder / "text.txt"), "--samples", "2")
    words = (str(folder / "path"), "--chat")
    tracing = ("--samples", "3", "--lengths", "100,160", "--batch-size")
    rows = evaluate("variable_assignment", tmp_path / "1", words[0], *tracing, "1")
    assert rows == evaluate("variable_assignment", tmp_path / "16", words[0], *tracing, "16")
    assert [row["column"] for row in rows[:3]] == ["last_value", "swaps", "mixed"]
    assert rows[1]["difficulty"] > 3 and rows[-1]["difficulty"] is None
    assert rows[-1]["column"] == "mean of 3" and 140 < rows[-1]["longest"] <= 160
    rows = evaluate("phonebook", tmp_path, *words, "--samples", "2", "--lengths", "300,600")
    assert [row["length"] for row in rows] == [300, 600] and rows[1]["longest"] > 500
    tasks = ("--tasks", "vt", "fwe", "niah_single_2")
    rows = evaluate("ruler", tmp_path, *words, *background, *tasks, "--lengths", "2500")
    assert [row["column"] for row in rows] == ["niah_single_2", "vt", "fwe", "mean of 3"]
    assert all(0 <= row["low"] <= row["score"] <= row["high"] <= 1 for row in rows if row["low"])
    line = (tmp_path / "path" / "ruler.samples.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["prompt"].startswith("<user>A special magic number is hidden")


def test_models_of_one_tokenizer_share_samples(folder, tmp_path, monkeypatch):
    whole, calls = suites.phonebook_sample, []

    def counts(*arguments):
        calls.append(1)
        return whole(*arguments)

    monkeypatch.setattr(suites, "phonebook_sample", counts)
    words = (str(folder / "path"), str(folder / "llama"), "--samples", "3", "--lengths", "300")
    rows = evaluate("phonebook", tmp_path, *words)
    assert len(rows) == 2 and len(calls) == 3
    prompts = [
        [json.loads(x)["prompt"] for x in (tmp_path / name / "phonebook.samples.jsonl").open()]
        for name in ("path", "llama")
    ]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 3


def test_what_is_wrong_is_said_before_a_model_is_loaded(
    folder, data_dir, tmp_path, monkeypatch, capsys
):
    def load(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("path_attention.evaluation.harness.command.load_model", load)
    monkeypatch.setattr(data, "_FROM_HUB", lambda *a, **k: (_ for _ in ()).throw(OSError("no net")))
    model = (str(folder / "path"), "--out", str(tmp_path / "o"))
    from_dir = ("--data-dir", str(data_dir))
    cases = {
        ("zero_shot",): "data: expected EleutherAI/wikitext_document_level",
        ("zero_shot", *from_dir): "data: expected 62 rows of EleutherAI/wikitext",
        ("longbench_e", *from_dir): "",
        ("maths_and_code", "--tasks", "humaneval", *from_dir): "data_dir: expected openai/openai_h",
        ("ruler", "--tasks", "qa_3"): "tasks: expected of",
        ("babilong", "--tasks", "qa0"): "tasks: neither bAbI nor BABILong has a question before",
        ("maths_and_code", "--tasks", "theoremqa"): "tasks: lm-eval 0.4.13 has no TheoremQA, so",
        ("phonebook", "--lengths", "40"): "lengths: expected room",
        ("phonebook", "--samples", "0"): "samples: expected at least 1",
        ("phonebook", "--lengths", "300,300"): "lengths: expected different numbers from 0 on",
        ("ruler", "--lengths", "-5"): "lengths: expected different numbers from 0 on",
        ("babilong", "--lengths", "0,1000"): "lengths: expected 0 or multiples of 1024 without",
        ("phonebook", "--limit", "0"): "limit: expected at least 1, got 0",
        ("phonebook", "--piece", "0"): "piece: expected at least 1, got 0",
        ("phonebook", "--context", "0"): "context: expected at least 1, got 0",
        ("phonebook", "--batch-size", "0"): "batch_size: expected at least 1, got 0",
        ("ruler", "--background", "nowhere.txt"): "sources: expected",
    }
    for words, message in cases.items():
        assert failure(capsys, "evaluate", words[0], *model, *words[1:]).startswith(
            f"error: {message}"
        )
    for file in (folder / "path").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / "mute").mkdir(exist_ok=True)
            (tmp_path / "mute" / file.name).write_bytes(file.read_bytes())
    message = failure(capsys, "evaluate", "phonebook", str(tmp_path / "mute"), "--chat")
    assert message.startswith("error: chat: expected a chat template, mute's tokenizer has none")
    monkeypatch.setattr(data, "ROWS", {})
    broken = tmp_path / "broken"
    place = "baber--piqa/default/validation.jsonl"
    (broken / place).parent.mkdir(parents=True)
    (broken / place).write_bytes((data_dir / place).read_bytes().replace(b"bal", b"bam", 1))
    manifest = json.loads((data_dir / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps({place: manifest[place]}))
    words = ("zero_shot", "--tasks", "piqa", "--data-dir", str(broken))
    assert "with sha256" in failure(capsys, "evaluate", words[0], *model, *words[1:])
    (broken / place).unlink()
    assert "with bytes" in failure(capsys, "evaluate", words[0], *model, *words[1:])
    assert not (tmp_path / "o").exists()


def test_too_long_is_refused_unless_cutting_is_asked_for(folder, tmp_path, capsys):
    words = ("phonebook", str(folder / "llama"), "--lengths", "300", "--samples", "2")
    out = ("--out", str(tmp_path))
    message = failure(capsys, "evaluate", *words, *out, "--context", "200")
    assert message.startswith("error: context: expected room for a request of phonebook_300 of")
    for how in ("left", "middle"):
        rows = evaluate(*words[:1], tmp_path, *words[1:], "--context", "200", "--truncate", how)
        assert rows[0]["longest"] == 200 and rows[0]["cut"] == 2


CODE = {
    "humaneval": (
        {
            "prompt": "def add(a, b):\n",
            "test": "def check(f):\n    assert f(2, 3) == 5\n",
            "entry_point": "add",
        },
        "    return a + b\n",
        "    return a - b\n",
    ),
    "mbpp": (
        {"test_list": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"], "test_setup_code": ""},
        "def add(a, b):\n    return a + b\n",
        "def add(a, b):\n    return 5\n",
    ),
    "mbpp_plus": (
        {"test_list": ["assert add(0, 0) == 0"], "test": "assert add(2, 3) == 5\n"},
        "def add(a, b):\n    return a + b\n",
        "def add(a, b):\n    return 0\n",
    ),
}


@pytest.mark.parametrize("name", CODE_TASKS)
def test_programs_are_scored_by_running_them(name, monkeypatch):
    doc, right, wrong = CODE[name]
    shots = [
        {"task_id": n, "text": f"Task {n}.", "code": "pass", "test_list": ["assert True"] * 3}
        for n in range(1, 11)
    ]
    shared = {"task_id": 11, "text": "Add.", "prompt": "Add.", "code": right}
    row = {**shared, "canonical_solution": right, "test_list": ["assert add(0, 0) == 0"], **doc}
    sets = {"test": [row], "prompt": shots}
    monkeypatch.setattr(
        datasets, "load_dataset",
        lambda *a, **k: {s: datasets.Dataset.from_list(r) for s, r in sets.items()},
    )  # fmt: skip
    task = CODE_TASKS[name]()
    assert task.process_results(row, [right]) == {"pass@1": 1.0}
    assert task.process_results(row, [wrong]) == {"pass@1": 0.0}
    task.set_config("num_fewshot", task.config.num_fewshot)
    task.build_all_requests(limit=1, rank=0, world_size=1)
    prompt = task.instances[0].args[0]
    if name == "humaneval":
        assert prompt == doc["prompt"]
    else:
        assert [prompt.count(f"Task {n}.") for n in (1, 2, 3, 4, 5)] == [0, 1, 1, 1, 0]
        assert prompt.count("[BEGIN]\n") == 4 and prompt.count("[DONE]") == 3
        assert prompt.endswith("[BEGIN]\n")


def test_gold_scores_one_and_wrong_scores_nothing_like_it():
    """Of every task of lm-eval's that writes; what is boxed counts where lm-eval reads dollars."""
    solution = "If $x > 0$, then $x = \\boxed{\\frac{1}{2}}$."
    math = {"problem": "x?", "level": "Level 5", "type": "Algebra", "solution": solution}
    document = {"context": "Text.", "input": "What?", "question": "What?", "length": 4321}
    document |= {"answers": ["blue green car"], "all_classes": ["red", "blue green car"]}
    hub = {
        "Xnhyacinth/LongBench": document,
        "openai/gsm8k": {"question": "How many?", "answer": "Two and two.\n#### 4"},
        "EleutherAI/hendrycks_math": math,
    }

    def load(path: str, name: str | None = None, **options: object):
        rows = datasets.Dataset.from_list([hub[path]] * 6)
        return datasets.DatasetDict(dict.fromkeys(("train", "test"), rows))

    sources = suites.Sources(load=load, count_tokens=len, tasks=("gsm8k", "hendrycks_math"))
    planned = suites.maths_and_code(sources)
    planned += suites.longbench_e(suites.Sources(load=load, count_tokens=len))
    assert len({p.column for p in planned}) == 2 + len(suites.LONGBENCH_E)
    gold = {"gsm8k": ["#### 4"], "hendrycks_math": [solution, "It is $\\frac12$", "\\frac{1}{2}"]}
    wrong = {"gsm8k": ["#### 5"], "hendrycks_math": ["It is $2$", "$\\boxed{2}$", "\\boxed{"]}
    for p in planned:
        doc = next(iter(p.task.test_docs()))
        (metric,) = p.metrics or ()
        for answer in gold.get(p.column, ["blue green car\n"]):
            found = p.task.process_results(doc, [answer])[metric]
            assert found == pytest.approx(1, abs=1e-6), (p.name, answer)
        for answer in wrong.get(p.column, ["nothing of it\n"]):
            assert p.task.process_results(doc, [answer])[metric] < 0.2, (p.name, answer)


def test_a_program_keeps_its_first_blank(monkeypatch):
    """Tokenizers of SentencePiece's kind, as Mistral's, take it off a text's first token."""
    words = ["<s>", "</s>", "def", "<0x0A>", "▁▁▁", "▁return", "▁x"]
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="</s>"))
    blanks = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*blanks, decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=words[0], eos_token=words[1]
    )
    prompt, written = [0, 2, 3], [4, 5, 6, 3, 4, 5, 6, 1]
    assert tokenizer.decode(written[:-1]) == "   return x\n    return x"
    monkeypatch.setattr(language_model, "greedy_answers", lambda *_: [written])
    model = LlamaForCausalLM(LlamaConfig(vocab_size=7, intermediate_size=32, **SIZES))
    lm = language_model.CausalLM(model, tokenizer, context=None)
    monkeypatch.setattr(lm, "tok_encode", lambda text: prompt)
    request = Instance("generate_until", {}, ("def\n", {"until": []}), 0, ("code", 0, 1))
    assert lm.generate_until([request]) == ["    return x\n    return x"]


def test_perplexity_on_long_texts(folder, tmp_path, monkeypatch, capsys):
    rng = random.Random(2)
    books = [" ".join(sentence(rng) for _ in range(80)) for _ in range(3)]
    rows = [{"text": book} for book in (*books, books[0])]  # one comes twice
    monkeypatch.setattr(data, "_FROM_HUB", lambda *a, **k: {"test": rows})
    monkeypatch.setattr("path_attention.evaluation.harness.texts.TEXTS", {"pg19": PG19})
    cli.main(["evaluate", "fetch", "perplexity_by_length", "--data-dir", str(tmp_path / "d")])
    files = sorted((tmp_path / "d" / "texts" / "pg19").iterdir())
    assert [file.read_text() for file in files] == books
    words = ["evaluate", "perplexity_by_length", str(folder / "path"), str(folder / "llama")]
    words += ["--out", str(tmp_path / "o"), "--lengths", "64,256", "--targets", "32"]
    own = ["--texts", "pg19", str(folder / "text.txt"), "--data-dir", str(tmp_path / "d")]
    cli.main([*words, *own, "--device", "cpu"])
    for name, documents in (("pg19", 3), ("text", 1)):
        found = read_result(tmp_path / "o" / f"perplexity_{name}.json")["rows"]
        assert {row["model"] for row in found} == {"path", "llama"}
        assert {row["documents"] for row in found} == {documents}
        assert (tmp_path / "o" / f"perplexity_{name}.png").stat().st_size > 1000
    together = read_result(tmp_path / "o" / "perplexity_by_length.json")["rows"]
    assert [row for row in together if row["text"] == "text"] == found
    assert list(dict.fromkeys(row["text"] for row in together)) == ["pg19", "text"]
    one, both = (imread(tmp_path / "o" / f"perplexity_{x}.png") for x in ("text", "by_length"))
    assert both.shape[:2] == (2 * one.shape[0], one.shape[1])  # panels below each other
    monkeypatch.setattr("path_attention.evaluation.perplexity_by_length.load_model", None)
    texts = ("--out", str(tmp_path / "p"), "--texts", str(folder / "text.txt"))
    (tmp_path / "short.txt").write_text("bal bem.")
    (tmp_path / "text.md").write_text("bal bem.")
    for other, message in {
        "nowhere.txt": "sources: expected",
        "short.txt": "lengths: expected at most",
        "text.md": "texts: expected a different name for each and none 'by_length', got ['t",
        "by_length.txt": "texts: expected a different name for each and none 'by_length', got ['t",
    }.items():
        assert failure(capsys, *words, *texts, str(tmp_path / other)).startswith(
            f"error: {message}"
        )
    files[1].write_text("changed")
    assert "with bytes" in failure(capsys, *words, *own)
    empty = ("--texts", "pg19", "--data-dir", str(tmp_path / "none"))
    assert failure(capsys, *words, *empty).startswith("error: data_dir: expected pg19 in")
