"""Several corpora as one, in given shares: text:code:maths as 1:1:1.

Rows are dealt in rounds. With weights 2:1 a round is three rows, two of the first corpus and one of
the second, in an order drawn from (seed, round): after every round the shares are exact, and any
row is found by its number alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from path_attention.training.corpus import Split, TokenCorpus
from path_attention.training.rows import PackedRows, Row, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FINEST = 1000  # shares are fractions with a denominator up to this
_LONGEST = 10_000  # rows of a round


class CorpusMixture:
    """Corpora of one tokenizer with a weight each; reads as a `TokenCorpus` where it has to.

    Documents of all parts are numbered one part behind the other.

    Args:
        parts: the corpora.
        weights: whole numbers are ratios (1, 1, 1); others are shares and must sum to 1.

    Raises:
        ValueError: weights that do not sum up or are not above 0; corpora of two tokenizers.
    """

    def __init__(self, parts: Sequence[TokenCorpus], weights: Sequence[float]) -> None:
        self.parts = list(parts)
        self.weights = whole_weights(weights)
        if not parts or len(parts) != len(self.weights):
            raise ValueError(
                f"mixture: expected a weight for each corpus, got {len(weights)} for {len(parts)}"
            )
        digests = [_tokenizer_digest(part) for part in self.parts]
        for part, digest in zip(self.parts, digests, strict=True):
            if digest != digests[0]:
                raise ValueError(
                    f"mixture: expected corpora of one tokenizer, those of {self.parts[0].path} "
                    f"and {part.path} differ"
                )
        self.path = self.parts[0].path
        self.vocab_size = self.parts[0].vocab_size

    @classmethod
    def open(cls, specifications: Sequence[str]) -> CorpusMixture:
        """From "FOLDER=WEIGHT" each, or "FOLDER" alone for a weight of 1."""
        pairs = [parse_part(text) for text in specifications]
        return cls([TokenCorpus.open(folder) for folder, _ in pairs], [w for _, w in pairs])

    @property
    def fingerprint(self) -> str:
        """Hash of the parts' fingerprints and weights."""
        content = [[part.fingerprint for part in self.parts], self.weights]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def names(self) -> list[str]:
        """The documents' names."""
        return [name for part in self.parts for name in part.names]

    @cached_property
    def info(self) -> dict[str, Any]:
        """Counts as in corpus.json, summed, and each part's own under "parts"."""
        infos = [part.info for part in self.parts]
        names = ("documents", "heldout_documents", "tokens", "heldout_tokens", "bytes")
        sources = [source for info in infos for source in info["recipe"]["sources"]]
        return {
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            **{name: sum(info[name] for info in infos) for name in names},
            "recipe": {"sources": sources, "seed": infos[0]["recipe"]["seed"]},
            "parts": [
                {"folder": str(part.path), "weight": weight, **part.info}
                for part, weight in zip(self.parts, self.weights, strict=True)
            ],
        }

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that made them."""
        return self.parts[0].tokenizer()


class MixedRows:
    """Rows of several corpora in rounds.

    Args:
        mixture, split, context_length, row_tokens, seed: as `PackedRows`; of a held-out split,
            parts without one are left out.

    Attributes:
        epoch_tokens: of the first rows, in which no part comes twice.

    Raises:
        ValueError: as `PackedRows`.
    """

    def __init__(
        self,
        mixture: CorpusMixture,
        split: Split,
        *,
        context_length: int,
        row_tokens: int,
        seed: int,
    ) -> None:
        self.row_tokens, self.seed = row_tokens, seed
        chosen = [
            (part, weight, start)
            for part, weight, start in zip(
                mixture.parts, mixture.weights, _starts(mixture.parts), strict=True
            )
            if split == "train" or part.info["heldout_tokens"]
        ]
        self.weights = [weight for _, weight, _ in chosen]
        self.documents = [start for _, _, start in chosen]
        self.rows = [
            PackedRows(part, split, context_length=context_length, row_tokens=row_tokens, seed=seed)
            for part, _, _ in chosen
        ]
        self._owner = np.repeat(np.arange(len(self.weights)), self.weights)
        whole = sum(self.weights)
        self.epoch_tokens = min(
            rows.epoch_tokens * whole // weight
            for rows, weight in zip(self.rows, self.weights, strict=True)
        )

    def row(self, number: int) -> Row:
        """Row `number`, counted from 0."""
        turn, place = divmod(number, len(self._owner))
        slot = int(np.random.default_rng([self.seed, turn]).permutation(len(self._owner))[place])
        part = int(self._owner[slot])
        first = sum(self.weights[:part])
        row = self.rows[part].row(turn * self.weights[part] + slot - first)
        start = self.documents[part]
        documents = tuple(start + document for document in row.documents)
        return Row(row.input_ids, row.labels, row.packing, documents)


def pack_rows(corpus: TokenCorpus | CorpusMixture, split: Split, **options: Any) -> Rows:
    """`PackedRows` of a corpus, `MixedRows` of a mixture."""
    if isinstance(corpus, CorpusMixture):
        return MixedRows(corpus, split, **options)
    return PackedRows(corpus, split, **options)


def parse_part(text: str) -> tuple[Path, float]:
    """("FOLDER=WEIGHT") → the folder and the weight, 1 if there is none.

    Raises ValueError on a weight that is no number.
    """
    folder, separator, weight = text.rpartition("=")
    if not separator:
        return Path(text), 1.0
    try:
        return Path(folder), float(weight)
    except ValueError:
        raise ValueError(f"mixture: expected FOLDER=WEIGHT, got {text!r}") from None


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as the smallest whole numbers in their ratio (shares to a thousandth).

    Where these would sum to more than 10,000, which makes rounds long and slow, they are rounded to
    parts of 10,000 instead (by largest remainders).

    Raises ValueError if one is not above 0, or if shares do not sum to 1.
    """
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"mixture: expected weights above 0, got {list(weights)}")
    if not all(float(w).is_integer() for w in weights) and abs(sum(weights) - 1) > 1e-6:
        raise ValueError(
            f"mixture: expected whole numbers, or shares that sum to 1, got {list(weights)}, "
            f"which sum to {sum(weights):g}"
        )
    shares = [Fraction(w).limit_denominator(_FINEST) for w in weights]
    scale = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    if sum(whole) // math.gcd(*whole) > _LONGEST:
        shares = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
        whole = _rounded(shares)
    if not all(share * _FINEST >= 1 for share in shares):
        raise ValueError(f"mixture: expected shares of at least 1/{_FINEST}, got {list(weights)}")
    divisor = math.gcd(*whole)
    return [number // divisor for number in whole]


def _rounded(shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers that sum to `_LONGEST`, each within one of its share of it."""
    whole = [math.floor(share * _LONGEST) for share in shares]
    order = sorted(range(len(shares)), key=lambda n: whole[n] - shares[n] * _LONGEST)
    for n in order[: _LONGEST - sum(whole)]:
        whole[n] += 1
    return whole


def _starts(parts: list[TokenCorpus]) -> list[int]:
    counts = [part.info["documents"] for part in parts]
    return [sum(counts[:n]) for n in range(len(counts))]


def _tokenizer_digest(corpus: TokenCorpus) -> str:
    from path_attention.training.tokenizer import tokenizer_digest

    return tokenizer_digest(corpus.tokenizer())
