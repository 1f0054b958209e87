"""Instruction, examples and form of an answer for each of BABILong's questions.

The wording follows BABILong's protocol (babilong/prompts.py of booydar/babilong), so that numbers
compare with published ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """instruction, (facts and question, answer) examples, and the form that an answer must have."""

    instruction: str
    examples: tuple[tuple[str, str], ...]
    form: str


_BASE = "You need to answer the question based only on the information from the facts."
_LATEST = "If a person was in different locations, use the latest location"
_ITEMS = (
    "I give you context with the facts about locations and actions of different persons hidden in "
    f"some random text and a question.{_BASE}\nIf a person got an item in the first location and "
    "travelled to the second location the item is also in the second location. If a person dropped "
    "an item in the first location and moved to the second location the item remains in the first "
    "location"
)
_WHERE = (
    "I will give you context with the facts about people and their locations hidden in some random "
    f"text and a question. {_BASE} {_LATEST} the person was in to answer the question."
)
_CARRY = (
    "I will give you context with the facts about people and objects they carry, hidden in some "
    f"random text and a question. {_BASE}"
)
_STOP = "Do not write anything else after that."
_WORD = f"Your answer should contain only one word. {_STOP} Do not explain your answer."

PROMPTS: dict[str, Prompt] = {
    "qa1": Prompt(
        "I will give you context with the facts about positions of different persons hidden in "
        f"some random text and a question. {_BASE} {_LATEST} to answer the question.",
        (
            (
                "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled "
                "to balcony. Where is Charlie?",
                "The most recent location of Charlie is balcony.",
            ),
            (
                "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse "
                "travelled to balcony. Where is Alan?",
                "The most recent location of Alan is shop.",
            ),
        ),
        "Always return your answer in the following format: The most recent location of ’person’ "
        f"is ’location’. {_STOP}",
    ),
    "qa2": Prompt(
        f"{_ITEMS}.",
        (
            (
                "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. "
                "Where is the bottle?",
                "The bottle is in the balcony.",
            ),
            (
                "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. "
                "Where is the screw driver?",
                "The screw driver is in the kitchen.",
            ),
        ),
        f"Always return your answer in the following format: The ’item’ is in ’location’. {_STOP}",
    ),
    "qa3": Prompt(
        _ITEMS,
        (
            (
                "John journeyed to the bedroom.Mary grabbed the apple. Mary went back to the "
                "bathroom. Daniel journeyed to the bedroom. Daniel moved to the garden. Mary "
                "travelled to the kitchen. Where was the apple before the kitchen?",
                "Before the kitchen the apple was in the bathroom.",
            ),
            (
                "John went back to the bedroom. John went back to the garden. John went back to "
                "the kitchen. Sandra took the football. Sandra travelled to the garden. Sandra "
                "journeyed to the bedroom. Where was the football before the bedroom?",
                "Before the kitchen the football was in the garden.",
            ),
        ),
        "Always return your answer in the following format: Before the $location_1& the $item$ was "
        f"in the $location_2$. {_STOP}",
    ),
    "qa4": Prompt(
        "I will give you context with the facts about different people, their location and "
        f"actions, hidden in some random text and a question. {_BASE}",
        (
            (
                "The hallway is south of the kitchen. The bedroom is north of the kitchen. What is "
                "the kitchen south of?",
                "bedroom",
            ),
            (
                "The garden is west of the bedroom. The bedroom is west of the kitchen. What is "
                "west of the bedroom?",
                "garden",
            ),
        ),
        f"Your answer should contain only one word - location. {_STOP}",
    ),
    "qa5": Prompt(
        "I will give you context with the facts about locations and their relations hidden in some "
        f"random text and a question. {_BASE}",
        (
            (
                "Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the "
                "bedroom. Bill took the milk there. Who did Mary give the apple to?",
                "Fred",
            ),
            (
                "Jeff took the football there. Jeff passed the football to Fred. Jeff got the milk "
                "there. Bill travelled to the bedroom. Who gave the football?",
                "Jeff",
            ),
            (
                "Fred picked up the apple there. Fred handed the apple to Bill. Bill journeyed to "
                "the bedroom. Jeff went back to the garden. What did Fred give to Bill?",
                "apple",
            ),
        ),
        _WORD,
    ),
    "qa6": Prompt(
        _WHERE,
        (
            (
                "John travelled to the hallway. John travelled to the garden. Is John in the "
                "garden?",
                "yes",
            ),
            (
                "Mary went to the office. Daniel journeyed to the hallway. Mary went to the "
                "bedroom. Sandra went to the garden. Is Mary in the office?",
                "no",
            ),
        ),
        f"Your answer should contain only one word - $yes$ or $no$. {_STOP} Do not explain your "
        "answer.",
    ),
    "qa7": Prompt(
        _CARRY,
        (
            (
                "Daniel went to the bedroom. Daniel got the apple there. How many objects is "
                "Daniel carrying?",
                "one",
            ),
            (
                "Mary grabbed the apple there. Mary gave the apple to John. How many objects is "
                "Mary carrying?",
                "none",
            ),
            (
                "Sandra travelled to the hallway. Sandra picked up the milk there. Sandra took the "
                "apple there. Mary travelled to the garden. How many objects is Sandra carrying?",
                "two",
            ),
        ),
        f"Your answer should contain only one word - $none$ or $number_of_objects$. {_STOP} Do not "
        "explain your answer.",
    ),
    "qa8": Prompt(
        _CARRY,
        (
            (
                "Sandra travelled to the garden. Mary grabbed the milk there. What is Mary "
                "carrying?",
                "milk",
            ),
            (
                "Mary travelled to the kitchen. Sandra travelled to the office. John travelled to "
                "the office. Sandra discarded the milk there. What is Sandra carrying?",
                "nothing",
            ),
            (
                "Daniel grabbed the apple there. Mary went to the office. Daniel moved to the "
                "garden. Daniel grabbed the milk there. Mary went to the kitchen. What is Daniel "
                "carrying?",
                "apple,milk",
            ),
        ),
        "Your answer should contain only one or two words: $nothing$ or $object$ or $object_1$, "
        "$object_2$. Do not write anything else. Do not explain your answer.",
    ),
    "qa9": Prompt(
        _WHERE,
        (
            (
                "John is not in the bathroom. Sandra is not in the bedroom. Is John in the "
                "bathroom?",
                "no",
            ),
            (
                "Mary journeyed to the kitchen. John is in the bedroom. Sandra is not in the "
                "garden. Is Mary in the kitchen?",
                "yes",
            ),
        ),
        "Your answer should contain only one word - $yes$ or $no$. Do not write anything else. Do "
        "not explain your answer.",
    ),
    "qa10": Prompt(
        _WHERE,
        (
            (
                "Bill is in the kitchen. Julie is either in the school or the cinema. Is Bill in "
                "the bedroom?",
                "no",
            ),
            (
                "Fred is in the bedroom. Mary is either in the school or the cinema. Is Mary in "
                "the school?",
                "maybe",
            ),
            (
                "Fred is either in the kitchen or the park. Bill moved to the cinema. Is Bill in "
                "the cinema?",
                "yes",
            ),
        ),
        "Your answer should contain only one word - $yes$ or $no$ or $maybe$. Do not write "
        "anything else. Do not explain your answer.",
    ),
}
