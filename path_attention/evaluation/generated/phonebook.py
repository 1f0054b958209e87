"""PhoneBook: copy one number out of a telephone book that was just read.

Layout and metric of arXiv 2402.01032 (Jelassi et al.), lengths of arXiv 2505.16381.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from path_attention.evaluation.generated.sample import CountTokens, Sample, fill

_FIRST = """
    Adam Alice Amelia Andrew Anna Arthur Barbara Benjamin Carol Charles Clara Daniel David Diana
    Edward Eleanor Emily Eric Florence Frank George Grace Hannah Harold Helen Henry Irene Isaac
    Jack James Jane Joseph Julia Karen Kevin Laura Leonard Lily Louis Margaret Martin Mary
    Michael Nancy Nathan Nina Oliver Oscar Paul Peter Philip Rachel Richard Robert Rose Ruth
    Samuel Sarah Simon Sophie Stephen Susan Theodore Thomas Victor Walter William"""
_LAST = """
    Abbott Adams Allen Bailey Baker Barnes Bell Bennett Black Brooks Brown Butler Campbell Carter
    Chapman Clark Collins Cook Cooper Cox Davis Dixon Edwards Ellis Evans Fisher Foster Fox
    Gibson Graham Grant Gray Green Griffin Hall Harris Harrison Hayes Henderson Hill Holmes
    Howard Hughes Hunt Jackson Jenkins Johnson Jones Kelly Kennedy King Knight Lee Lewis Marshall
    Martin Mason Miller Mitchell Moore Morgan Morris Murphy Murray Nelson Owen Palmer Parker
    Perry Phillips Porter Powell Price Reed Reynolds Richards Roberts Robinson Rogers Ross
    Russell Scott Shaw Simpson Smith Spencer Stewart Stone Taylor Thompson Turner Walker Wallace
    Ward Watson Webb West White Williams Wilson Wood Woods Wright Young"""
NAMES = tuple(f"{first} {last}" for first, last in product(_FIRST.split(), _LAST.split()))
_SHOTS = 2
_NEW_TOKENS = 16  # of a 10-digit number, where each digit is a token, with room


def phonebook_sample(seed: int, length: int, count_tokens: CountTokens) -> Sample:
    """A book of as many entries as fit, two of them again as examples, and a third one's name.

    Args:
        seed: each gives other entries.
        length: tokens of context, answer included.
        count_tokens: of a text.

    >>> sample = phonebook_sample(0, 80, lambda text: len(text.split()))
    >>> book, shots, asked = sample.prompt.split("\\n\\n")
    >>> len(book.splitlines()), all(line in book for line in shots.splitlines())
    (18, True)
    >>> f"{asked} {sample.references[0]}" in book
    True

    Raises:
        ValueError: naming `lengths` if three entries do not fit.
    """
    rng = np.random.default_rng(seed)
    names = [NAMES[i] for i in rng.permutation(len(NAMES))]
    numbers = [f"{n}" for n in rng.integers(10**9, 10**10, len(NAMES))]
    places = rng.random(_SHOTS + 1)

    def build(entries: int) -> Sample:
        lines = [f"{names[n]}: {numbers[n]}" for n in range(entries)]
        chosen: list[int] = []
        for place in places:
            left = [n for n in range(entries) if n not in chosen]
            chosen.append(left[int(place * len(left))])
        *shots, asked = chosen
        parts = ["\n".join(lines), "\n".join(lines[n] for n in shots), f"{names[asked]}:"]
        return Sample("\n\n".join(parts), "", (numbers[asked],), _NEW_TOKENS, length)

    return fill(build, count_tokens, least=_SHOTS + 1, most=len(NAMES))
