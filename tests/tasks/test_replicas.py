"""Replicas compute what their models compute, and step as AdamW steps each of them."""

from __future__ import annotations

import pytest
import torch

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.tasks.optimizer import ReplicatedAdamW
from path_attention.tasks.replicas import Replicas

R, B, T, V = 3, 2, 37, 7
CASES = [
    ("path", {}),
    ("path", {"direction_rank": None, "num_key_value_heads": 1}),
    ("path", {"direction_conv_size": 0, "householders_per_token": 2, "qk_norm": True}),
    ("path_fox", {"householders_per_token": 2}),
    ("path_alibi", {}),
    ("rope", {}),
    ("fox", {"output_norm": True}),
    ("stick_breaking", {}),
    ("rotation_learned_qkv", {}),
    ("rotation_learned", {"rotation_angles": "learned_state"}),
    ("rotation_token", {}),
    ("delta_net", {}),
    ("path_linear", {}),
]


def models(encoding: str, options: dict) -> list[PathAttentionForCausalLM]:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = PathAttentionConfig.from_preset(
        encoding, vocab_size=V, initializer_range=0.1, **sizes, **options
    )
    return [PathAttentionForCausalLM(config) for _ in range(R)]


@pytest.mark.parametrize(("encoding", "options"), CASES)
def test_replicas_are_their_models(encoding: str, options: dict) -> None:
    """Outputs and gradients, in float32: what differs is the order of sums."""
    alone = models(encoding, options)
    for model in alone:  # no parameter may hide at its start, where it is 0 or 1
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(V, (R * B, T))
    weights = torch.randn(R * B, T, V)
    wanted, gradients = [], []
    for r, model in enumerate(alone):
        rows = slice(r * B, (r + 1) * B)
        logits = model(input_ids=tokens[rows], use_cache=False).logits
        (logits * weights[rows]).sum().backward()
        wanted.append(logits.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    replicas = Replicas(alone, "cpu")
    logits = replicas.logits(tokens)
    close(logits.detach(), torch.cat(wanted), 1e-4)
    grads = torch.autograd.grad((logits * weights).sum(), replicas.parameters)
    for name, grad in zip(replicas.names, grads, strict=True):
        close(grad, torch.stack([of_model[name] for of_model in gradients]), 2e-3)


def close(x: torch.Tensor, y: torch.Tensor, share: float) -> None:
    """float32 sums in another order, through two layers that may amplify: a share of the whole."""
    assert x.shape == y.shape
    error, size = (x.double() - y.double()).norm(), y.double().norm()
    assert error <= share * size, f"off by {error / size:.1e} of the whole"


def test_a_replica_goes_back_to_a_model() -> None:
    alone = models("path_fox", {})
    states = [{k: v.clone() for k, v in model.state_dict().items()} for model in alone]
    replicas = Replicas(alone, "cpu")
    for r, state in enumerate(states):
        back = replicas.state_dict(r)
        assert back.keys() == state.keys()
        assert all(torch.equal(back[name], state[name]) for name in state)
    replicas.flat.zero_()
    assert all((p == 0).all() for p in replicas.model.parameters())  # they are its views


def test_what_has_no_replicated_form_is_refused() -> None:
    config = models("path", {})[0].config
    config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="models: expected untied embeddings"):
        Replicas([PathAttentionForCausalLM(config)], "cpu")
    (odd,) = models("path", {})[:1]
    odd.model.norm = torch.nn.LayerNorm(16)
    with pytest.raises(ValueError, match="model.norm is a LayerNorm"):
        Replicas([odd], "cpu")


def steps_of(decays: list[float], rates: list[float], clip: float | None, steps: int = 5):
    """Replicas after some steps by random gradients, and the same by torch's AdamW."""
    alone = models("path", {})
    replicas = Replicas(models_like(alone), "cpu")
    shares = [1.0, 0.5, 0.25, 0.7, 0.1]
    ours = ReplicatedAdamW(
        replicas, rates=rates, decays=decays, shares=shares, betas=(0.9, 0.95), eps=1e-8, clip=clip
    )
    theirs = []
    for model, rate, decay in zip(alone, rates, decays, strict=True):
        big = [p for p in model.parameters() if p.dim() > 1]
        small = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": big, "weight_decay": decay}, {"params": small, "weight_decay": 0.0}]
        theirs.append((torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95)), rate))
    for share in shares[:steps]:
        for r, (model, (optimizer, rate)) in enumerate(zip(alone, theirs, strict=True)):
            for n, p in enumerate(model.parameters()):
                p.grad = torch.randn_like(p)
                replicas.gradients[n][r].copy_(p.grad)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(list(model.parameters()), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
        ours.step()
    return replicas, ours, alone


def models_like(alone: list[PathAttentionForCausalLM]) -> list[PathAttentionForCausalLM]:
    copies = models("path", {})
    for copy, model in zip(copies, alone, strict=True):
        copy.load_state_dict(model.state_dict())
    return copies


@pytest.mark.parametrize("clip", [None, 1.0, 1e4])
def test_it_steps_as_adamw_does(clip: float | None) -> None:
    replicas, _, alone = steps_of([0.0, 0.1, 0.3], [1e-2, 1e-3, 3e-3], clip)
    for r, model in enumerate(alone):
        for name, value in replicas.state_dict(r).items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_replica_that_is_not_active_stays_as_it_is() -> None:
    replicas, optimizer, _ = steps_of([0.1] * R, [1e-2] * R, None, steps=2)
    before = replicas.flat.clone()
    optimizer.active[1] = False
    replicas.gradient.fill_(1.0)
    optimizer.step()
    moved = (replicas.flat != before).any(1)
    assert moved.tolist() == [True, False, True] and optimizer.finite.all()


def test_a_gradient_that_is_not_finite_ends_its_replica_alone() -> None:
    replicas, optimizer, _ = steps_of([0.1] * R, [1e-2] * R, 1.0, steps=2)
    before = replicas.flat.clone()
    replicas.gradient.fill_(1.0)
    replicas.gradient[2, 5] = float("nan")
    optimizer.step()
    replicas.gradient.fill_(1.0)
    optimizer.step()
    assert optimizer.active.tolist() == optimizer.finite.tolist() == [True, True, False]
    assert torch.equal(replicas.flat[2], before[2]) and replicas.flat.isfinite().all()
    assert (replicas.flat[:2] != before[:2]).any(1).all()
