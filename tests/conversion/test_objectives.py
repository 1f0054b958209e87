"""What each stage minimises, against the same written out with whole models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from families import make_teacher

from path_attention import Packing
from path_attention.conversion.lora import LoraRecipe, add_adapters, merge_adapters
from path_attention.conversion.objectives import Choices, MatchAttention, MatchLogits, NextToken
from path_attention.conversion.starts import start_encoding
from path_attention.conversion.teacher import (
    as_teacher,
    copy_model,
    is_attention,
    is_encoding,
    student_config,
)
from path_attention.nn.encoding import RotaryHouseholder
from path_attention.training.flops import attention_size, linear_weights
from path_attention.training.processes import Processes
from path_attention.training.recipe import DataRecipe, ModelRecipe, Recipe
from path_attention.training.rows import IGNORED, Row

ALONE = Processes(0, 1, torch.device("cpu"))
LENGTHS = (20, 1, 33)


def make_recipe(**fields) -> Recipe:
    return Recipe(
        name="x",
        model=ModelRecipe(),
        data=DataRecipe(context_length=40),
        steps=4,
        batch_tokens=54,
        precision="float32",
        **fields,
    )


def make_row() -> Row:
    packing = Packing.from_lengths(list(LENGTHS))
    ids = torch.randint(0, 61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, packing.cu_seqlens[:-1].long()] = IGNORED
    return Row(ids, labels, packing, (0, 1, 2))


def make_pair(family: str = "qwen3", to: str = "path_fox", keep_rope: bool = False):
    """A teacher, and a student of its weights."""
    teacher = as_teacher(make_teacher(family))
    config = student_config(teacher.model.config, to, keep_rope=keep_rope)
    return teacher, copy_model(teacher.model, config).train()


def prepared(objective, student, **fields):
    objective.prepare(student, make_recipe(**fields), ALONE, torch.float32)
    return objective


def literal_errors(teacher, student) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ over tokens but each document's first of the mean square, document by document."""
    errors = torch.zeros(2)
    squares = torch.zeros(2)
    seen: list[tuple] = []

    def note(module, inputs, output) -> None:
        seen.append((inputs[0], output))

    hooks = [layer.attention.register_forward_hook(note) for layer in teacher.model.layers]
    for document in make_row().input_ids[0].split(list(LENGTHS)):
        seen.clear()
        with torch.no_grad():
            teacher(document[None])
        for n, (x, target) in enumerate(list(seen)):
            got = student.model.layers[n].attention(x)
            errors[n] = errors[n] + (got - target)[:, 1:].square().mean(-1).sum()
            squares[n] = squares[n] + target[:, 1:].square().mean(-1).sum()
    for hook in hooks:
        hook.remove()
    return errors, squares


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "smollm3"])
def test_attention_is_matched_on_the_teachers_activations(family, relative, checkpointed) -> None:
    teacher, student = make_pair(family)
    errors, squares = literal_errors(teacher.model, student)
    targets = sum(LENGTHS) - len(LENGTHS)
    exact = (errors / squares if relative else errors / targets).mean()
    gradients = torch.autograd.grad(
        exact, [p for n, p in student.named_parameters() if is_attention(n)]
    )
    choices = Choices(trainable="attention")
    objective = prepared(MatchAttention(teacher, choices, relative=relative), student)
    if checkpointed:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    loss = objective.loss(student, make_row(), targets, ALONE.device)
    assert exact > 1e-3
    torch.testing.assert_close(loss, exact, rtol=1e-4, atol=0)
    loss.backward()
    trained = {n: p for n, p in student.named_parameters() if p.requires_grad}
    assert set(trained) == {n for n, _ in student.named_parameters() if is_attention(n)}
    for (name, parameter), expected in zip(trained.items(), gradients, strict=True):
        torch.testing.assert_close(
            parameter.grad, expected, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert not any("_teacher" in name for name in student.state_dict())


def test_a_student_that_is_the_teacher_errs_by_nothing() -> None:
    teacher = as_teacher(make_teacher("llama"))
    config = student_config(teacher.model.config, "path", keep_rope=True)
    student = copy_model(teacher.model, config)
    start_encoding(student, "exchange", context=10**7)
    objective = prepared(
        MatchAttention(teacher, Choices(trainable="attention", exchange=0.5), relative=True),
        student,
    )
    row, losses = make_row(), []
    for step in range(4):
        objective.begin_step(step, 4)
        losses.append(float(objective.loss(student, row, row.targets, ALONE.device).detach()))
    assert losses[0] < 1e-6 and losses[1] > 1e-3 and losses[1] == losses[2] == losses[3]


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "top_k": 7}])
def test_logits_are_matched_where_there_are_targets(options) -> None:
    teacher, student = make_pair("qwen2")
    row = make_row()
    with torch.no_grad():
        p = teacher.model(row.input_ids, packing=row.packing).logits[0]
    q = student(row.input_ids, packing=row.packing).logits[0]
    places = (row.labels[0, 1:] != IGNORED).nonzero()[:, 0]
    assert len(places) == row.targets == sum(LENGTHS) - len(LENGTHS)
    t = options.get("temperature", 1.0)
    log_p, log_q = (torch.log_softmax(z[places] / t, -1) for z in (p, q))
    if "top_k" in options:
        log_p, indices = log_p.topk(7, -1)
        log_q = log_q.gather(-1, indices)
        rest = [torch.log1p(-z.exp().sum(-1, keepdim=True)) for z in (log_p, log_q)]
        log_p, log_q = (torch.cat([z, r], -1) for z, r in zip((log_p, log_q), rest, strict=True))
    exact = t * t * (log_p.exp() * (log_p - log_q)).sum() / 10
    gradients = torch.autograd.grad(exact, list(student.parameters()))
    objective = prepared(MatchLogits(teacher, Choices(), **options), student)
    loss = objective.loss(student, row, 10, ALONE.device)
    torch.testing.assert_close(loss, exact, rtol=1e-4, atol=1e-6)
    loss.backward()
    for parameter, expected in zip(student.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-4)
    assert all(p.grad is None and not p.requires_grad for p in teacher.model.parameters())


def test_low_rank_updates_are_what_the_exported_model_has() -> None:
    _, student = make_pair("llama", "path")
    plain = {name: value.clone() for name, value in student.state_dict().items()}
    recipe = LoraRecipe(rank=3, alpha=6.0)
    objective = prepared(NextToken(Choices(trainable="lora", lora=recipe)), student)
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    assert trained == {
        name for name, _ in student.named_parameters() if ".lora_" in name or is_encoding(name)
    }
    ids = make_row().input_ids
    before = student(ids).logits
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    after = student.eval()(ids).logits
    assert (after - before).abs().max() > 0.1
    config, state = objective.exported(student.config, student.state_dict())
    whole = type(student)(config).eval()
    whole.load_state_dict(state)
    torch.testing.assert_close(whole(ids).logits, after, rtol=1e-4, atol=1e-4)
    changed = {name for name in plain if not torch.equal(plain[name], state[name])}
    parts = [f"attention.{n}" for n in "qkvo"] + [f"mlp.{n}" for n in ("gate", "up", "down")]
    assert changed == {f"model.layers.{n}.{p}_proj.weight" for n in range(2) for p in parts}


def test_adapters_hang_on_the_seed_alone() -> None:
    drawn = []
    for seed in (0, 0, 1):
        _, student = make_pair("llama", "path")
        torch.manual_seed(torch.seed() % 1000)
        add_adapters(student, LoraRecipe(rank=2), seed)
        state = student.state_dict()
        drawn.append(next(v for k, v in state.items() if ".lora_A." in k))
        assert (
            merge_adapters(state, LoraRecipe(rank=2)).keys()
            == make_pair("llama", "path")[1].state_dict().keys()
        )
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_the_exchanges_share_falls_to_nothing() -> None:
    half, whole = Choices(exchange=0.5), Choices(exchange=1.0)
    assert [half.share(n, 9) for n in range(9)] == [1.0, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0]
    assert [whole.share(n, 5) for n in range(5)] == [1.0, 0.75, 0.5, 0.25, 0]
    assert whole.share(0, 1) == 0 and Choices().share(0, 9) == 0
    _, student = make_pair("llama", "path", keep_rope=True)
    objective = prepared(NextToken(half), student)
    objective.begin_step(2, 9)
    shares = {float(layer.attention.transport.share) for layer in student.model.layers}
    assert shares == {0.5}
    config, _ = objective.exported(student.config, {})
    assert (config.transport, config.rope_frequencies) == ("householder", None)
    _, student = make_pair("smollm3", "path", keep_rope=True)
    kinds = [layer.attention.transport for layer in student.model.layers]
    assert [isinstance(kind, RotaryHouseholder) for kind in kinds] == [True, False]
    config, _ = prepared(NextToken(half), student).exported(student.config, {})
    assert (config.transport, config.nope_layers) == ("householder", None)


def test_contradictions_are_refused() -> None:
    teacher, student = make_pair("llama", "path")
    with pytest.raises(ValueError, match="^exchange: expected it with a student that keeps RoPE"):
        prepared(NextToken(Choices(exchange=0.5)), student)
    _, kept = make_pair("llama", "path", keep_rope=True)
    with pytest.raises(ValueError, match="^exchange: .*got None with one that keeps RoPE"):
        prepared(NextToken(Choices()), kept)
    with pytest.raises(ValueError, match="^trainable: expected 'attention' or 'encoding'"):
        MatchAttention(teacher, Choices(trainable="all"))
    with pytest.raises(ValueError, match="^trainable: expected one of .*got 'atention'"):
        Choices(trainable="atention")  # pyright: ignore
    with pytest.raises(ValueError, match=r"^exchange: expected in \(0, 1\]"):
        Choices(exchange=0.0)
    rope = copy_model(teacher.model, student_config(teacher.model.config, "rope"))
    with pytest.raises(ValueError, match="^trainable: expected parameters to train"):
        prepared(NextToken(Choices(trainable="encoding")), rope)
    with torch.no_grad():
        student.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="^teacher: expected the student's .*up_proj"):
        prepared(MatchAttention(teacher, Choices(trainable="attention")), student)
    short = dataclasses.replace(teacher, window=39)
    with pytest.raises(ValueError, match="^context_length: expected at most 39"):
        prepared(MatchLogits(short, Choices()), make_pair("llama", "path")[1])
    with pytest.raises(ValueError, match="^rank: expected at least 1"):
        LoraRecipe(rank=0)
    with pytest.raises(ValueError):
        add_adapters(make_pair("llama", "path")[1], LoraRecipe(matrices=("nothing",)), 0)


def products(run) -> int:
    """FLOPs of plain matrix products in a run, as PyTorch counts them: those of linear layers,
    since attention multiplies batches."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    return sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))


@pytest.mark.parametrize("rank", [4, None])
@pytest.mark.parametrize("trainable", ["all", "attention", "encoding", "lora"])
@pytest.mark.parametrize("kind", [MatchAttention, MatchLogits, NextToken])
def test_the_counted_flops_are_those_that_are_done(kind, trainable, rank) -> None:
    if kind is MatchAttention and trainable in ("all", "lora"):
        pytest.skip("attention is matched by attention alone")
    if trainable == "lora":
        pytest.importorskip("peft")
    teacher = as_teacher(make_teacher("qwen3"))
    config = student_config(teacher.model.config, "path_fox", direction_rank=rank)
    student = copy_model(teacher.model, config).train()
    choices = Choices(trainable=trainable)
    objective = prepared(
        NextToken(choices) if kind is NextToken else kind(teacher, choices), student
    )
    row = make_row()
    T = sum(LENGTHS)

    def step() -> None:
        objective.loss(student, row, 1.0, torch.device("cpu")).backward()

    counted = objective.flops(student, attention_size(config))
    done = products(step)
    expected = counted.token * T
    vocabulary = config.vocab_size * config.hidden_size
    if kind is MatchLogits:  # its heads see what is predicted alone
        expected -= (T - row.targets) * vocabulary * (2 + 4 + 2 * (trainable == "all"))
    if kind is not MatchAttention and trainable != "all":  # the embedding asks for no gradient
        first = sum(w.numel() for w in linear_weights(student.model.layers[0].attention).values())
        assert expected - 2 * T * first <= done <= expected
    else:
        assert done == expected
    layers, sizes = config.num_hidden_layers, config.head_dim + config.value_head_dim
    forward = layers * config.num_attention_heads * sizes
    assert counted.scores == forward * (3 if kind is NextToken else 4)
