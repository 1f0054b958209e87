"""The paper's numbers (arXiv 2505.16381v2, 760M parameters, 50B tokens), for tables beside ours."""

from __future__ import annotations

MODELS = ("RoPE", "FoX", "PaTH", "PaTH-FoX")
# suite → (column, length, metric) → one number a model, in percent but for perplexities
Published = dict[str, dict[tuple[str, int | str | None, str], tuple[float, ...]]]


def _by_length(
    column: str, rows: dict[int | str, tuple[float, ...]], metric: str = "mean"
) -> dict[tuple[str, int | str | None, str], tuple[float, ...]]:
    return {(column, length, metric): numbers for length, numbers in rows.items()}


PUBLISHED: Published = {
    "zero_shot": {
        ("wikitext", None, "word_perplexity"): (19.01, 18.33, 18.03, 17.35),
        ("lambada_openai", None, "perplexity"): (19.77, 18.28, 16.79, 16.23),
        ("lambada_openai", None, "acc"): (40.4, 41.7, 44.0, 44.1),
        ("piqa", None, "acc"): (70.2, 70.8, 70.5, 70.8),
        ("hellaswag", None, "acc_norm"): (50.3, 50.9, 51.5, 52.2),
        ("winogrande", None, "acc"): (54.9, 57.1, 56.0, 57.1),
        ("arc_easy", None, "acc"): (67.2, 65.7, 68.9, 67.3),
        ("arc_challenge", None, "acc_norm"): (33.3, 32.6, 34.4, 33.9),
        ("mean of 6", None, "mean"): (52.7, 53.1, 54.2, 54.2),
    },
    "ruler": _by_length(
        "mean of 13",
        {
            4096: (35.7, 41.6, 44.6, 42.3),
            8192: (1.3, 29.5, 34.8, 34.0),
            16384: (0.0, 4.9, 18.7, 22.6),
        },
    ),
    "babilong": _by_length(
        "mean of 5",
        {
            0: (33.0, 23.8, 33.8, 28.6),
            4096: (13.8, 20.2, 24.6, 25.6),
            8192: (0.0, 8.2, 16.8, 19.2),
            16384: (0.0, 4.4, 11.6, 10.0),
        },
    ),
    "phonebook": _by_length(
        "phonebook",
        {
            2048: (32.3, 62.5, 55.2, 89.6),
            4096: (15.6, 38.5, 20.8, 93.8),
            8192: (0.0, 17.7, 0.0, 66.6),
        },
        "score",
    ),
    "longbench_e": _by_length(
        "mean of 11",
        {
            "0-4000": (18.7, 23.4, 27.2, 23.4),
            "4000-8000": (3.7, 16.9, 22.5, 21.8),
            "8000+": (2.0, 11.7, 14.4, 16.1),
        },
    ),
}
