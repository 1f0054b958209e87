"""Recipes of the synthetic tasks, and the grids that reproduce each claim, in order of work.

Published, from arXiv 2505.16381 §4.1: flip-flop's lengths, tests and its model (1 layer, 2 heads,
width 64); MQRAR's pairs, length, layers, width and heads; that a group word's length is solved
above 90 %. From arXiv 2306.00946 (flip-flop): batch 16, a loss on the bits read, AdamW (0.9,
0.999), 10,000 steps. From arXiv 2404.08819 (A5 over its 60 elements): width 512, 8 heads, batch
512, weight decay 0.01, lengths to 20. Everything else is open in these and chosen here:

- Start N(0, 0.02); w through rank 32 and a convolution of width 3; no q/k norm; bfloat16 autocast;
  gradients clipped at norm 1; a cosine down to a tenth of the peak.
- Flip-flop: weight decay 0, a peak of 1e-3, β's bias starting at 2 (a β of 1.76), since with decay
  or a lower start a run that has reached no error on sparse sequences is apt to leave it again.
  `flip_flop_search` varies the three.
- Group words: a start token before the first letter, without which one layer cannot tell a letter
  from its repetition; in the identity form half of the words are closed on purpose. One run with
  targets at every prefix stands for a run of each length: a length is solved where more than 90 %
  of words have every prefix up to it right. The longest prefix that is a target grows from 2 to 20
  over the first half of training. Sequences are drawn anew for ever, so short words are bound to
  have been seen in training; of 60 elements, no word of 20 has.
- Other forms of A5 and S5, S3, Z60: width 256, 4 heads, batch 256.
- MQRAR: layout as `Mqrar` says, half of the pairs ask, keys with too few assignments are no
  target, loss on answers alone; batch 32, a peak of 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from path_attention.models.presets import PRESETS
from path_attention.tasks.flip_flop import FlipFlop
from path_attention.tasks.group_words import GroupWords
from path_attention.tasks.mqrar import Mqrar
from path_attention.tasks.recipe import Options, TaskRecipe

SEEDS = (0, 1, 2)
FIVE_SEEDS = (0, 1, 2, 3, 4)
COMPARED = ("rope", "stick_breaking", "fox")
FIRST = ("path", *COMPARED)
OTHERS = ("alibi", "nope", "path_fox", "path_alibi", "rotation_learned")
_BELOW_TWO = 2 - 2**-7  # the largest bfloat16 below 2

Grid = list[TaskRecipe]


def flip_flop_recipe(encoding: str = "path") -> TaskRecipe:
    """Flip-flop at the published size."""
    options: Options = {}
    if encoding in PRESETS and PRESETS[encoding]["transport"] == "householder":
        options["beta_bias_init"] = 2.0
    return TaskRecipe(
        task=FlipFlop(), encoding=encoding, options=options, steps=10_000, check_every=500
    )


def group_words_recipe(encoding: str = "path") -> TaskRecipe:
    """S5 over its 10 swaps, words to 20."""
    return TaskRecipe(
        task=GroupWords(),
        encoding=encoding,
        width=256,
        heads=4,
        steps=10_000,
        batch=256,
        learning_rate=5e-4,
        weight_decay=0.01,
        warmup_steps=200,
        curriculum_steps=5_000,
        check_every=500,
        stop_after=2,
    )


def mqrar_recipe(encoding: str = "path") -> TaskRecipe:
    """MQRAR-1 at the published size."""
    return TaskRecipe(
        task=Mqrar(),
        encoding=encoding,
        layers=2,
        width=256,
        heads=2,
        steps=4_000,
        batch=32,
        weight_decay=0.01,
        warmup_steps=200,
        check_every=250,
        stop_after=2,
    )


def flip_flop_search() -> Grid:
    """Weight decay, β's start and rate of PaTH on flip-flop, five seeds: 60 runs of one shape."""
    task = FlipFlop(sparse_sequences=50_000)
    base = replace(flip_flop_recipe(), task=task, steps=3_000, check_every=250)
    return product(
        [base],
        weight_decay=(0.0, 0.1),
        beta_bias_init=(0.0, 2.0),
        learning_rate=(3e-4, 1e-3, 3e-3),
        seed=FIVE_SEEDS,
    )


def flip_flop() -> Grid:
    """PaTH on flip-flop: five seeds, 3 million sparse reads each."""
    task = FlipFlop(sparse_sequences=860_000)
    return product([replace(flip_flop_recipe(), task=task)], seed=FIVE_SEEDS)


def s5_swaps() -> Grid:
    """S5 over swaps: PaTH with one layer, RoPE with one to four."""
    path = product([group_words_recipe()], seed=SEEDS)
    return path + product([group_words_recipe("rope")], layers=(4, 1, 2), seed=SEEDS)


def mqrar() -> Grid:
    """MQRAR-1 to 4, PaTH and the encodings it was compared with."""
    tasks = [Mqrar(n_back=n) for n in (1, 2, 3, 4)]
    bases = [replace(mqrar_recipe(encoding), task=task) for encoding in FIRST for task in tasks]
    return product(bases, seed=SEEDS)


def mqrar_longer() -> Grid:
    """PaTH on MQRAR-3 and 4 for 8,000 steps: after 4,000 some seeds are still on their way."""
    tasks = [Mqrar(n_back=n) for n in (3, 4)]
    return product([replace(mqrar_recipe(), task=task, steps=8_000) for task in tasks], seed=SEEDS)


def flip_flop_encodings() -> Grid:
    """Flip-flop for every other encoding."""
    return product([flip_flop_recipe(encoding) for encoding in COMPARED + OTHERS], seed=SEEDS)


def a5_cycles(encodings: Iterable[str] = FIRST) -> Grid:
    """A5 over its 3-cycles, prefix products, by layers."""
    return by_layers(GroupWords(group="A5", generators="three_cycles"), encodings)


def a5_identity(encodings: Iterable[str] = FIRST) -> Grid:
    """A5 over its 3-cycles: whether a word is the identity, by layers."""
    return by_layers(GroupWords(group="A5", generators="three_cycles", form="identity"), encodings)


def a5_elements(encodings: Iterable[str] = FIRST) -> Grid:
    """A5 over its 60 elements (Merrill's form), by layers, at the published size."""
    return by_layers(
        GroupWords(group="A5", generators="all"),
        encodings,
        width=512,
        heads=8,
        batch=512,
        steps=20_000,
        curriculum_steps=10_000,
        learning_rate=3e-4,
    )


def by_layers(
    task: GroupWords, encodings: Iterable[str], layers: Iterable[int] = (1, 2, 3, 4), **changes: Any
) -> Grid:
    """A group's words for some encodings: first all with fewest layers."""
    names, grid = list(encodings), []
    for count in layers:
        bases = [
            replace(group_words_recipe(encoding), task=task, layers=count, **changes)
            for encoding in names
        ]
        grid += product(bases, seed=SEEDS)
    return grid


def s5_ablations() -> Grid:
    """PaTH on S5 over swaps without one thing at a time."""
    return without_one_thing(group_words_recipe())


def a5_ablations() -> Grid:
    """PaTH with two layers on A5 over its 3-cycles, without one thing at a time."""
    task = GroupWords(group="A5", generators="three_cycles")
    return without_one_thing(replace(group_words_recipe(), task=task, layers=2))


def mqrar_ablations() -> Grid:
    """PaTH on MQRAR-3 without one thing at a time."""
    return without_one_thing(replace(mqrar_recipe(), task=Mqrar(n_back=3)))


def flip_flop_ablations() -> Grid:
    """PaTH on flip-flop without one thing at a time."""
    return without_one_thing(flip_flop_recipe())


def without_one_thing(base: TaskRecipe) -> Grid:
    """A recipe of PaTH, and it with each of the paper's choices changed, some in float32."""
    changes: list[Options] = [
        {},
        {"beta_max": 1.0},
        {"beta_max": _BELOW_TWO},
        {"direction_conv_size": 0},
        {"qk_norm": True},
        {"householders_per_token": 2},
    ]
    grid = product([with_options(base, change) for change in changes], seed=SEEDS)
    exact = [base, with_options(base, {"beta_max": _BELOW_TWO})]
    return grid + product(exact, precision=("float32",), seed=SEEDS)


def a5_householders() -> Grid:
    """Two factors a token on every form of A5, where one token is more than one reflection."""
    forms = a5_elements() + a5_cycles() + a5_identity()
    path = [r for r in forms if r.encoding == "path" and r.layers < 3]
    return product(path, householders_per_token=(2,))


def controls(encodings: Iterable[str] = FIRST) -> Grid:
    """The solvable groups S3 over swaps and Z60 over its elements."""
    tasks = [GroupWords(group="S3"), GroupWords(group="Z60", generators="all")]
    return [recipe for task in tasks for recipe in by_layers(task, encodings, (1, 2))]


def mqrar_others() -> Grid:
    """MQRAR-1 to 4 for the encodings that PaTH was not compared with."""
    tasks = [Mqrar(n_back=n) for n in (1, 2, 3, 4)]
    recall = [replace(mqrar_recipe(name), task=task) for name in OTHERS for task in tasks]
    return product(recall, seed=SEEDS)


def s5_swaps_others() -> Grid:
    """S5 over swaps for every other encoding, by layers."""
    names = ("stick_breaking", "fox", *OTHERS)
    return product([group_words_recipe(name) for name in names], layers=(1, 2, 4), seed=SEEDS)


def a5_others() -> Grid:
    """Every form of A5 for the encodings that PaTH was not compared with, by layers."""
    return a5_cycles(OTHERS) + a5_identity(OTHERS) + a5_elements(OTHERS)


def controls_others() -> Grid:
    """The solvable groups for the encodings that PaTH was not compared with."""
    return controls(OTHERS)


def demo() -> Grid:
    """A small flip-flop for two CPU cores: 64 tokens, PaTH beside RoPE, two seeds."""
    task = FlipFlop(pairs=32, sparse_sequences=8_000)
    bases = [
        replace(
            flip_flop_recipe(encoding),
            task=task,
            steps=600,
            check_every=100,
            learning_rate=3e-3,
            precision="float32",
        )
        for encoding in ("path", "rope")
    ]
    return product(bases, seed=(0, 1))


GRIDS: dict[str, Callable[[], Grid]] = {
    grid.__name__: grid
    for grid in (
        flip_flop_search,
        flip_flop,
        s5_swaps,
        mqrar,
        mqrar_longer,
        flip_flop_encodings,
        a5_cycles,
        s5_ablations,
        flip_flop_ablations,
        a5_elements,
        a5_householders,
        a5_identity,
        controls,
        mqrar_others,
        s5_swaps_others,
        mqrar_ablations,
        a5_ablations,
        controls_others,
        a5_others,
        demo,
    )
}
ORDER_OF_WORK = tuple(name for name in GRIDS if name != "demo")


def find_grid(name: str) -> Grid:
    """The recipes of a grid. Raises ValueError on an unknown name."""
    if name not in GRIDS:
        raise ValueError(f"grids: expected names among {list(GRIDS)}, got {name!r}")
    return GRIDS[name]()


def with_options(recipe: TaskRecipe, change: Options) -> TaskRecipe:
    """The recipe with these fields of the model's configuration."""
    return replace(recipe, options={**recipe.options, **change})


def product(recipes: Iterable[TaskRecipe], **values: Iterable) -> Grid:
    """Every recipe with every combination of these values, the last named changing first.

    A name is a field of `TaskRecipe`, or of the model's configuration.
    """
    found = list(recipes)
    of_recipe = {field.name for field in fields(TaskRecipe)}
    for name, choices in values.items():
        options = list(choices)
        if name in of_recipe:
            found = [replace(r, **{name: value}) for r in found for value in options]
        else:
            found = [with_options(r, {name: value}) for r in found for value in options]
    return list({recipe.run: recipe for recipe in found}.values())
