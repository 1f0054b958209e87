"""The tokenizer: one by name or folder, or a byte-level BPE trained on the training documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"  # before and after each document
PAD = "<|pad|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, and the two special tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (as GPT-2's: no unknown token, lossless) of at most `vocab_size` tokens.

    Calling it on a text puts `<|endoftext|>` first, as each training document has it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the hub or a folder. Raises ValueError if it can't be loaded or has no end."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # hub, file and parser errors alike
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"tokenizer: {name!r} can't be loaded: {reason}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer: expected one with a tokenizer.json, {name!r} has none")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer: expected one with an end-of-text token, {name!r} has none")
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id: vocabularies may have holes, as GPT-4's before its end."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash of the vocabulary, merges and rules."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
