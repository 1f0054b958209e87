"""Reading through the cache in pieces: the same numbers for any piece, batch and padding."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from path_attention.evaluation.harness.batches import BatchSize
from path_attention.evaluation.reading import greedy_answers, log_likelihoods
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM

VOCABULARY = 97
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model(name: str):
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=VOCABULARY, initializer_range=0.3, **sizes, **ends)
        return GPT2LMHeadModel(config).eval()
    shared = {"vocab_size": VOCABULARY, "initializer_range": 0.3, **SIZES}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(intermediate_size=64, **shared)).eval()
    return PathAttentionForCausalLM(PathAttentionConfig.from_preset(name, **shared)).eval()


@pytest.fixture(params=["llama", "gpt2", "path", "path_fox", "rope"])
def model(request):
    return make_model(request.param)


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    lengths = (5, 130, 61, 200, 1)
    return [torch.randint(1, VOCABULARY, (n,), generator=rng).tolist() for n in lengths]


@torch.no_grad()
def test_likelihoods_are_those_of_one_forward(model):
    rows = [(p[: max(1, len(p) // 3)], p[max(1, len(p) // 3) :] or [7]) for p in prompts()]
    expected = []
    for context, continuation in rows:
        logits = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1]
        found = logits.double().log_softmax(-1)
        target = torch.tensor(continuation)
        total = found.gather(1, target[:, None]).sum().item()
        expected.append((total, bool((found.argmax(-1) == target).all())))
    # Each term is of a float32 softmax: some roundings of logits of size 20 in each.
    for piece in (7, 64, 2048):
        for answers in (
            log_likelihoods(model, rows, piece),
            [log_likelihoods(model, [row], piece)[0] for row in rows],
        ):
            for (total, greedy), (right, is_greedy), row in zip(
                answers, expected, rows, strict=True
            ):
                assert abs(total - right) < 20 * 8 * 2**-23 * len(row[1])
                assert greedy == is_greedy


def test_a_greedy_continuation_is_known_as_one(model):
    prompt = prompts()[1]
    written = greedy_answers(model, [prompt], 5, lambda ids: False)[0]
    other = [*written[:-1], (written[-1] + 1) % VOCABULARY]
    found = log_likelihoods(model, [(prompt, written), (prompt, other)], 16)
    assert [greedy for _, greedy in found] == [True, False] and found[0][0] > found[1][0]


def test_answers_do_not_depend_on_batch_piece_or_padding(model):
    alone = [greedy_answers(model, [p], 12, lambda ids: False)[0] for p in prompts()]
    assert all(len(ids) == 12 for ids in alone)
    for piece in (16, 2048):
        assert greedy_answers(model, prompts(), 12, lambda ids: False, piece) == alone
    end = alone[2][4]
    stopped = greedy_answers(model, prompts(), 12, lambda ids: ids[-1] == end)
    for ids, whole in zip(stopped, alone, strict=True):
        assert ids == whole[: whole.index(end) + 1 if end in whole else None]


def test_logits_that_are_no_numbers_are_refused(model):
    """Of one token, which nothing here holds, at every place; −∞ forbids a token and is one."""
    rows = [([token % 96 for token in prompt], [7, 5]) for prompt in prompts()[1:3]]
    head = model.get_output_embeddings()
    forbid = head.register_forward_hook(
        lambda *call: call[2].masked_fill(torch.arange(VOCABULARY) > 7, -torch.inf)
    )
    written = greedy_answers(model, [row[0] for row in rows], 4, lambda ids: False)
    assert max(map(max, written)) <= 7
    assert all(math.isfinite(total) for total, _ in log_likelihoods(model, rows))
    forbid.remove()
    with torch.no_grad():
        head.weight[96] = torch.nan
    model.name_or_path = "runs/broken"
    message = "^models: expected logits that are numbers, got others after {} tokens from runs/brok"
    for piece in (16, 2048):
        with pytest.raises(ValueError, match=message.format(61)):
            log_likelihoods(model, rows, piece)
        with pytest.raises(ValueError, match=message.format(61)):
            greedy_answers(model, [row[0] for row in rows], 3, lambda ids: True, piece)
        with pytest.raises(ValueError, match=message.format(130)):
            greedy_answers(model, [rows[0][0]], 3, lambda ids: True, piece)


def test_pieces_bound_what_is_read_at_once(model):
    seen = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    greedy_answers(model, prompts(), 3, lambda ids: False, 32)
    log_likelihoods(model, [(prompts()[3], [1, 2])], 32)
    assert max(seen) == 32


def test_a_batch_is_as_large_as_fits():
    room, seen = 300, []

    def answer(batch):
        if sum(batch) > room:
            raise torch.OutOfMemoryError("too much")
        seen.append(len(batch))
        return [2 * length for length in batch]

    requests = [10] * 100 + [100] * 8
    size = BatchSize(grows=True)
    size.tokens = 100
    assert sorted(size.run(requests, lambda n: n, answer)) == sorted((n, 2 * n) for n in requests)
    assert size.largest > 10 and seen[0] == 1
    assert list(BatchSize(3).run([5] * 7, lambda n: n, answer)) == [(5, 10)] * 7
    assert seen[-3:] == [3, 3, 1]
    with pytest.raises(torch.OutOfMemoryError):
        list(size.run([400], lambda n: n, answer))
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        BatchSize(0)
