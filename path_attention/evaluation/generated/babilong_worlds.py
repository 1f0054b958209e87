"""Small worlds of people, rooms and things: what happened, a question, and its answer.

Each function takes a generator of random numbers and returns (facts, question, answer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

World = tuple[list[str], str, str]
T = TypeVar("T")

_PEOPLE = ["Mary", "John", "Daniel", "Sandra"]
_GIVERS = ["Bill", "Fred", "Jeff", "Mary"]
_ROOMS = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"]
_THINGS = ["apple", "football", "milk"]
_MOVES = ["moved to", "went to", "went back to", "journeyed to", "travelled to"]
_TAKES = ["got", "took", "grabbed", "picked up"]
_DROPS = ["dropped", "discarded", "put down", "left"]
_GIVES = ["gave", "passed", "handed"]
_COUNTS = ["none", "one", "two", "three"]


def _one(rng: np.random.Generator, choices: list[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


def _go(rng: np.random.Generator, person: str, room: str) -> str:
    return f"{person} {_one(rng, _MOVES)} the {room}."


def one_fact(rng: np.random.Generator) -> World:
    """qa1: where somebody is, after ten moves of four people."""
    where: dict[str, str] = {}
    facts = []
    for _ in range(10):
        person = _one(rng, _PEOPLE)
        where[person] = _one(rng, [room for room in _ROOMS if room != where.get(person)])
        facts.append(_go(rng, person, where[person]))
    asked = _one(rng, sorted(where))
    return facts, f"Where is {asked}?", where[asked]


class _Carried:
    """People who walk, take and drop things; and the rooms that each thing has been in."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.facts: list[str] = []
        self.where: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.trail: dict[str, list[str]] = {}  # of a thing: rooms in order, since it was first seen

    def move(self, person: str) -> None:
        room = _one(self.rng, [r for r in _ROOMS if r != self.where.get(person)])
        self.where[person] = room
        self.facts.append(_go(self.rng, person, room))
        for thing in self.held(person):
            self.trail[thing].append(room)

    def held(self, person: str) -> list[str]:
        return [thing for thing, holder in self.holder.items() if holder == person]

    def step(self) -> None:
        """One thing that can happen: mostly a move, else a thing is taken or dropped."""
        person = _one(self.rng, _PEOPLE)
        mine = self.held(person)
        free = [
            thing
            for thing in _THINGS
            if thing not in self.holder
            and (thing not in self.trail or self.trail[thing][-1] == self.where.get(person))
        ]
        chance = self.rng.random()
        if person not in self.where or chance < 0.5 or not (mine or free):
            self.move(person)
        elif free and (chance < 0.8 or not mine):
            thing = _one(self.rng, free)
            self.holder[thing] = person
            self.trail.setdefault(thing, [self.where[person]])
            self.facts.append(f"{person} {_one(self.rng, _TAKES)} the {thing}.")
        else:
            thing = _one(self.rng, mine)
            del self.holder[thing]
            self.facts.append(f"{person} {_one(self.rng, _DROPS)} the {thing}.")


def two_facts(rng: np.random.Generator) -> World:
    """qa2: where a thing is, which somebody took along or dropped."""
    world = _Carried(rng)
    while len(world.facts) < 12 or not world.trail:
        world.step()
    thing = _one(rng, sorted(world.trail))
    return world.facts, f"Where is the {thing}?", world.trail[thing][-1]


def three_facts(rng: np.random.Generator) -> World:
    """qa3: where a thing was before it came to a room; that room is in its trail once."""
    world = _Carried(rng)

    def askable() -> list[tuple[str, int]]:
        return [
            (thing, n)
            for thing, rooms in sorted(world.trail.items())
            for n in range(1, len(rooms))
            if rooms.count(rooms[n]) == 1
        ]

    while len(world.facts) < 20 or not askable():
        world.step()
    thing, n = _one(rng, askable())
    rooms = world.trail[thing]
    return world.facts, f"Where was the {thing} before the {rooms[n]}?", rooms[n - 1]


def two_relations(rng: np.random.Generator) -> World:
    """qa4: three rooms, two relations; which room lies so, or what a room lies so of."""
    a, b, c = (_ROOMS[i] for i in rng.choice(len(_ROOMS), 3, replace=False))
    pairs = [("north", "south"), ("east", "west")]
    here, back = pairs[int(rng.integers(2))][:: 1 if rng.random() < 0.5 else -1]
    # From south to north, say: a, b, c. Each relation may be told from either of its ends.
    first = (
        f"The {b} is {here} of the {a}." if rng.random() < 0.5 else f"The {a} is {back} of the {b}."
    )
    second = (
        f"The {c} is {here} of the {b}." if rng.random() < 0.5 else f"The {b} is {back} of the {c}."
    )
    facts = [first, second] if rng.random() < 0.5 else [second, first]
    questions = [
        (f"What is {here} of the {b}?", c),
        (f"What is {back} of the {b}?", a),
        (f"What is the {b} {here} of?", a),
        (f"What is the {b} {back} of?", c),
    ]
    question, answer = _one(rng, questions)
    return facts, question, answer


def three_relations(rng: np.random.Generator) -> World:
    """qa5: who gave what to whom; each thing changes hands once, so no question has two answers."""
    facts, gifts = [], []
    takers = [_GIVERS[i] for i in rng.permutation(len(_GIVERS))]
    for thing, giver in zip((_THINGS[i] for i in rng.permutation(3)), takers, strict=False):
        receiver = _one(rng, [person for person in _GIVERS if person != giver])
        gifts.append((giver, thing, receiver))
        facts.append(f"{giver} {_one(rng, _TAKES)} the {thing} there.")
        facts.append(_go(rng, _one(rng, _GIVERS), _one(rng, _ROOMS)))
        facts.append(f"{giver} {_one(rng, _GIVES)} the {thing} to {receiver}.")
        facts.append(_go(rng, _one(rng, _GIVERS), _one(rng, _ROOMS)))
    giver, thing, receiver = _one(rng, gifts)
    questions = [
        (f"What did {giver} give to {receiver}?", thing),
        (f"Who gave the {thing} to {receiver}?", giver),
        (f"Who did {giver} give the {thing} to?", receiver),
        (f"Who gave the {thing}?", giver),
        (f"Who received the {thing}?", receiver),
    ]
    question, answer = _one(rng, questions)
    return facts, question, answer


def yes_or_no(rng: np.random.Generator) -> World:
    """qa6: is somebody in a room? Half the answers are yes."""
    facts, question, room = one_fact(rng)
    person = question.removeprefix("Where is ").removesuffix("?")
    if rng.random() < 0.5:
        return facts, f"Is {person} in the {room}?", "yes"
    other = _one(rng, [r for r in _ROOMS if r != room])
    return facts, f"Is {person} in the {other}?", "no"


def counting(rng: np.random.Generator) -> World:
    """qa7: how many things somebody carries."""
    world = _Carried(rng)
    while len(world.facts) < 12 or not world.trail:
        world.step()
    asked = _one(rng, sorted(world.where))
    count = len(world.held(asked))
    return world.facts, f"How many objects is {asked} carrying?", _COUNTS[count]


def listing(rng: np.random.Generator) -> World:
    """qa8: which things somebody carries."""
    world = _Carried(rng)
    while len(world.facts) < 12 or not world.trail:
        world.step()
    asked = _one(rng, sorted(world.where))
    answer = ",".join(sorted(world.held(asked))) or "nothing"
    return world.facts, f"What is {asked} carrying?", answer


def negation(rng: np.random.Generator) -> World:
    """qa9: as yes or no, where facts also say who is not in a room."""
    known: dict[str, tuple[str, bool]] = {}
    facts = []
    for _ in range(10):
        person, room = _one(rng, _PEOPLE), _one(rng, _ROOMS)
        inside = bool(rng.random() < 0.6)
        known[person] = (room, inside)
        facts.append(_go(rng, person, room) if inside else f"{person} is not in the {room}.")
    asked = _one(rng, sorted(known))
    room, inside = known[asked]
    if inside and rng.random() < 0.5:
        room, inside = _one(rng, [r for r in _ROOMS if r != room]), False
    return facts, f"Is {asked} in the {room}?", "yes" if inside else "no"


def uncertainty(rng: np.random.Generator) -> World:
    """qa10: as yes or no, where somebody may be in either of two rooms."""
    known: dict[str, list[str]] = {}
    facts = []
    for _ in range(10):
        person = _one(rng, _PEOPLE)
        rooms = [_ROOMS[i] for i in rng.choice(len(_ROOMS), 2, replace=False)]
        if rng.random() < 0.5:
            known[person] = rooms
            facts.append(f"{person} is either in the {rooms[0]} or the {rooms[1]}.")
        else:
            known[person] = rooms[:1]
            facts.append(_go(rng, person, rooms[0]))
    asked = _one(rng, sorted(known))
    if rng.random() < 0.6:
        room, answer = known[asked][0], "yes" if len(known[asked]) == 1 else "maybe"
    else:
        room, answer = _one(rng, [r for r in _ROOMS if r not in known[asked]]), "no"
    return facts, f"Is {asked} in the {room}?", answer


WORLDS: dict[str, Callable[[np.random.Generator], World]] = {
    "qa1": one_fact,
    "qa2": two_facts,
    "qa3": three_facts,
    "qa4": two_relations,
    "qa5": three_relations,
    "qa6": yes_or_no,
    "qa7": counting,
    "qa8": listing,
    "qa9": negation,
    "qa10": uncertainty,
}
