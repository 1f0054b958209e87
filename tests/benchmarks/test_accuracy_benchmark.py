"""The benchmark of errors: its unit, its cases, activations of a model, swaps."""

from __future__ import annotations

import pytest
import torch

from path_attention.benchmarks import accuracy
from path_attention.benchmarks.accuracy import RESULTS, BenchmarkAccuracy, exact_results, roundings
from path_attention.benchmarks.activations import capture, load_activations, save_activations
from path_attention.benchmarks.candidates import DEFINITION
from path_attention.benchmarks.inputs import (
    CASES,
    Inputs,
    make_inputs,
    names_used_by,
    swapped_inputs,
)
from path_attention.benchmarks.measure import Job
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.ops import path
from path_attention.results import read_result

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
SMALL = {"tokens": 80, "shapes": "1x8", "swap_tokens": "", "device": "cpu"}


def small_model(preset: str, **options) -> PathAttentionForCausalLM:
    config = PathAttentionConfig.from_preset(
        preset,
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        direction_rank=4,
        **options,
    )
    return PathAttentionForCausalLM(config).eval()


def test_the_unit_is_one_rounding():
    exact = torch.randn(1000, dtype=torch.float64)
    assert roundings(exact.to(BF16), exact, BF16) == 1
    assert roundings(exact.to(F32), exact, F32) == 1
    assert roundings(exact, exact, BF16) == 0
    assert roundings(exact + 3 * (exact.to(BF16) - exact), exact, BF16) == 3
    assert roundings(exact + torch.nan, exact, BF16) is None


@pytest.mark.parametrize("at_once", [1, 2**30])
def test_exact_results_are_the_definitions_over_all_heads(at_once, monkeypatch):
    monkeypatch.setattr(accuracy, "_AT_ONCE", at_once)
    x = make_inputs(1, 30, 4, 2, 8, BF16, CPU).rounded(BF16)
    grad_out = torch.randn(1, 30, 4, 8).to(BF16)
    wide = x.leaves(torch.Tensor.double)
    used = wide.used_by("path_fox")
    out, grads = Job(DEFINITION.make(wide, "path_fox"), used, grad_out.double()).run()
    for got, expected in zip(exact_results(x, "path_fox", grad_out), (out, *grads), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_cases_are_what_they_are_called():
    x = Inputs(*(y.detach() for y in make_inputs(1, 200, 2, 2, 64, F32, CPU)[:6]))
    changed = {name: case.change(x) for name, case in CASES.items()}
    w = changed["correlated_w"].w[0, :, 0]
    assert (w @ w.T).fill_diagonal_(0).sum() / (200 * 199) == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(w.norm(dim=-1), torch.ones(200))
    beta = changed["correlated_w"].beta
    assert beta.min() >= 1.9 and beta.max() <= 2
    assert torch.equal(changed["repeated_w"].w[:, 0], changed["repeated_w"].w[:, 199])
    assert changed["repeated_w"].beta.max() < 2
    assert (changed["gates_-50"].log_forget == -50).sum() == 2 * 2
    for name, case in CASES.items():
        others = set(names_used_by("path_fox")) - {case.concerns}
        if case.concerns == "log_forget":
            assert all(torch.equal(getattr(changed[name], n), getattr(x, n)) for n in others)
    large = changed["q_1e6_k_1e-6_v_1"]
    assert torch.equal(large.q, 1e6 * x.q) and torch.equal(large.k, 1e-6 * x.k)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_swapped_queries_are_their_keys_moved(heads):
    x, target = swapped_inputs(70, *heads, 16, torch.float64, CPU)
    moved = x.q[0].clone()  # H_{j+1} ⋯ H_i q_i, by the factors themselves
    G = heads[0] // heads[1]
    for h in range(heads[0]):
        for i in range(70):
            y = moved[i, h]
            for t in range(i, int(target[0, i, h]), -1):
                w = x.w[0, t, h // G].double()
                y = y - 2 * (w @ y) * w
            torch.testing.assert_close(y, x.k[0, target[0, i, h], h // G], rtol=0, atol=1e-5)


def test_writes_rows_figure_and_tables(tmp_path, capsys):
    options = {**SMALL, "swap_tokens": "100,130", "shapes": "1x8,2x32"}
    BenchmarkAccuracy(**options, dtype="bfloat16", out=tmp_path / "x").run()
    result = read_result(tmp_path / "x.json")
    errors = [row for row in result["rows"] if "found" not in row]
    expected = [
        (case, e, size)
        for case in CASES
        for size in (8, 32)
        for e in ("path", "path_fox", "fox")
        if CASES[case].concerns in names_used_by(e)
    ]
    got = {(row["case"], row["encoding"], row["size"]) for row in errors}
    assert got == set(expected) and len(errors) == len(expected)
    for row in errors:
        used = ["out", *(f"d{n}" for n in names_used_by(row["encoding"]))]
        assert [name for name in RESULTS if row[name] is not None] == used
        # As the operator's own tests allow: a few roundings, gradients of w, β and the gate more.
        assert row["finite"] and all(row[name] <= 6 for name in used)
    swaps = [row for row in result["rows"] if "found" in row]
    assert [(row["size"], row["tokens"]) for row in swaps] == [
        (size, T) for size in (8, 32) for T in (100, 130)
    ]
    assert all(row["found"] == 1 for row in swaps if row["size"] == 32)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "dlog_forget" in capsys.readouterr().out


def test_a_wrong_operator_shows(tmp_path, monkeypatch):
    right = path.IMPLEMENTATIONS["blockwise"]

    def wrong(q, k, v, w, beta, *others):
        out, lse = right(q, k, v, w, None if beta is None else 0.9 * beta, *others)
        return out * torch.where(torch.arange(out.shape[1]) == 3, torch.nan, 1)[:, None, None], lse

    options = {
        **SMALL,
        "cases": "random",
        "encodings": "path",
        "swap_tokens": "2000",
        "shapes": "1x32",
    }
    BenchmarkAccuracy(**options, out=tmp_path / "right").run()
    monkeypatch.setitem(path.IMPLEMENTATIONS, "blockwise", wrong)
    BenchmarkAccuracy(**options, out=tmp_path / "wrong").run()
    (good, found), (bad, lost) = (
        read_result(tmp_path / f"{n}.json")["rows"] for n in ("right", "wrong")
    )
    assert good["finite"] and good["out"] < 64 and not bad["finite"] and bad["out"] is None
    assert lost["found"] < 0.5 and found["found"] == 1


@pytest.mark.parametrize(
    ("preset", "encoding"),
    [("path", "path"), ("path_fox", "path_fox"), ("fox", "fox"), ("rope", "nope")],
)
def test_captured_activations_are_the_operators(preset, encoding, tmp_path, monkeypatch):
    from path_attention.nn import normalizer

    seen = []
    call = normalizer.path_attention

    def record(*tensors, **options):
        seen.append(tensors)
        return call(*tensors, **options)

    monkeypatch.setattr(normalizer, "path_attention", record)
    options = {} if preset == "rope" else {"num_key_value_heads": 1}
    layers = capture(small_model(preset, **options), torch.randint(50, (1, 20)))
    assert [layer.encoding for layer in layers] == [encoding] * 2
    save_activations(tmp_path / "a" / "x.safetensors", layers)
    loaded = load_activations(tmp_path / "a" / "x.safetensors", CPU)
    for got, again, expected in zip(layers, loaded, seen, strict=True):
        for x, y, z in zip(got[:6], again[:6], expected, strict=True):
            assert (x is None and y is None and z is None) or (
                torch.equal(x, y) and torch.equal(x, z)
            )


def test_a_models_activations_are_cases(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    small_model("path_fox").save_pretrained(folder)
    vocabulary = {word: n for n, word in enumerate(["[UNK]", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    text = tmp_path / "text"
    text.write_text("a b c c b a " * 20)
    options = {**SMALL, "cases": "", "tokens": 50}
    saved = tmp_path / "x.safetensors"
    BenchmarkAccuracy(
        **options, model=folder, text=text, save_activations=saved, out=tmp_path / "x"
    ).run()
    BenchmarkAccuracy(**options, activations=saved, out=tmp_path / "y").run()
    rows, again = (read_result(tmp_path / f"{n}.json")["rows"] for n in "xy")
    assert rows == again
    assert [(r["case"], r["encoding"], r["tokens"]) for r in rows] == [
        (f"layer_{n}", "path_fox", 50) for n in (0, 1)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": "easy"}, "cases: expected some of random"),
        ({"cases": ""}, "cases: expected any, or swap_tokens"),
        ({"text": "x"}, "model: expected together with text"),
        ({"save_activations": "x"}, "save_activations: expected a model and a text"),
        ({"model": "x", "activations": "y"}, "model: expected none beside activations"),
        ({"shapes": "0x8"}, "shapes: expected heads x size"),
        ({"swap_tokens": "-4"}, "swap_tokens: expected positive integers"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BenchmarkAccuracy(**{**SMALL, **options}, out=tmp_path / "x").run()


def test_files_that_hold_no_activations_are_refused(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "x").write_text("no tensors")
    with pytest.raises(ValueError, match="activations: expected safetensors"):
        load_activations(tmp_path / "x", CPU)
    save_file({"weight": torch.ones(2)}, tmp_path / "y")
    with pytest.raises(ValueError, match="activations: expected tensors named LAYER.NAME"):
        load_activations(tmp_path / "y", CPU)
    save_file({"0.q": torch.ones(2)}, tmp_path / "z")
    with pytest.raises(ValueError, match="activations: expected a layer's inputs"):
        load_activations(tmp_path / "z", CPU)


def test_models_with_another_operator_are_refused():
    with pytest.raises(ValueError, match="model: expected layers with a softmax, got StickBr"):
        capture(small_model("nope", normalizer="stick_breaking"), torch.ones(1, 2).long())
    with pytest.raises(ValueError, match="model: expected layers of ours, got Linear"):
        capture(torch.nn.Linear(2, 2), torch.ones(1, 2))
