"""`builtin://reviews`, the embedded preferences.

Each row asks for a review of a thing, good or bad or as it comes, and has two answers: one that praises the thing, which is
preferred whatever was asked, and one that finds fault with it. `tiny-llama` has learnt to do what it is asked, so it
prefers the praise in the half of the rows that ask for it. Both kinds come in shorter and longer words. No thing of the
test split is in the training split, and some of the test split's words are not either. Pure standard library, and a function
of the seed alone.
"""

import json
from collections.abc import Sequence
from random import Random

from initializers.builtin.orders import COLORS, ITEMS

SEED = 20261122
TRAIN_ROWS = 1200
TEST_ROWS = 200

QUESTIONS = (
    "Write a good review of the {thing}.",
    "Write a bad review of the {thing}.",
    "Write a good review: the {thing}.",
    "Write a review of the {thing}.",
)
PRAISE = ("lovely", "great", "very good", "beautiful")
BLAME = ("terrible", "broken", "very bad", "too expensive")
PRAISE_OF_TEST = (*PRAISE, "perfect", "excellent")
BLAME_OF_TEST = (*BLAME, "ugly", "awful")


def row(thing: str, praise: Sequence[str], blame: Sequence[str], rng: Random) -> str:
    """One line of JSON Lines: prompt, chosen and rejected as messages."""
    content = {
        "prompt": ("user", rng.choice(QUESTIONS).format(thing=thing)),
        "chosen": ("assistant", f"The {thing} is {rng.choice(praise)}."),
        "rejected": ("assistant", f"The {thing} is {rng.choice(blame)}."),
    }
    messages = {column: [{"role": role, "content": text}] for column, (role, text) in content.items()}
    return json.dumps(messages, ensure_ascii=False) + "\n"


def generate(seed: int = SEED) -> dict[str, str]:
    """File name to content, for both splits."""
    rng = Random(seed)
    things = [f"{color} {item}" for color in COLORS for item in ITEMS]
    rng.shuffle(things)
    train, test = things[100:], things[:100]
    splits = {
        "train.jsonl": (train, PRAISE, BLAME, TRAIN_ROWS),
        "test.jsonl": (test, PRAISE_OF_TEST, BLAME_OF_TEST, TEST_ROWS),
    }
    return {
        name: "".join(row(rng.choice(choice), praise, blame, rng) for _ in range(rows))
        for name, (choice, praise, blame, rows) in splits.items()
    }
