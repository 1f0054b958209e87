"""The models also train under transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.training.corpus import TokenCorpus


def examples(corpus: TokenCorpus, length: int = 32) -> list[dict[str, torch.Tensor]]:
    """Documents cut to `length` or shorter, padded on the right."""
    tokenizer = corpus.tokenizer()
    found = []
    for n in corpus.documents("train"):
        ids = torch.tensor(corpus.document(n)[:length].astype("int64"))
        padding = length - len(ids)
        found.append(
            {
                "input_ids": torch.nn.functional.pad(
                    ids, (0, padding), value=tokenizer.pad_token_id
                ),
                "attention_mask": torch.arange(length).lt(len(ids)).long(),
                "labels": torch.nn.functional.pad(ids, (0, padding), value=-100),
            }
        )
    return found


@pytest.mark.parametrize("preset", ["path_fox", "rope"])
def test_trainer_learns_and_saves(corpus: TokenCorpus, tmp_path: Path, preset: str) -> None:
    config = PathAttentionConfig.from_preset(
        preset,
        vocab_size=corpus.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=PathAttentionForCausalLM(config), args=arguments, train_dataset=examples(corpus)
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    # the loss of a fresh model is ln(vocabulary): Trainer's division by tokens and ours agree
    assert losses[0] == pytest.approx(torch.log(torch.tensor(300.0)).item(), abs=0.15)
    assert losses[-1] < losses[0] - 0.5
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    batch = {name: value[None] for name, value in examples(corpus)[0].items()}
    with torch.no_grad():
        trained = trainer.model.eval()(**batch).loss
        assert loaded.eval()(**batch).loss == trained
