"""`builtin://amounts`, the embedded prompts with an answer that can be verified.

Each row asks how many things an order is about, in words; its `answer` is the number word. Pure standard library, and a
function of the seed alone. The orders are those of `builtin://orders`: same words, same sentences, other questions.
"""

import json
from random import Random

from initializers.builtin.orders import NUMBER_WORDS, Order, orders, sentence

SEED = 20261122
TRAIN_ROWS = 1200
TEST_ROWS = 200

QUESTIONS = (
    "How many? In words.",
    "How many? Use words.",
    "How many, in words?",
    "Say how many in words.",
    "What is the quantity in words?",
)


def row(order: Order, rng: Random) -> str:
    """One line of JSON Lines: `{"prompt": text, "answer": number word}`."""
    line = {"prompt": f"{sentence(order, rng)} {rng.choice(QUESTIONS)}", "answer": NUMBER_WORDS[order.quantity - 1]}
    return json.dumps(line, ensure_ascii=False) + "\n"


def generate(seed: int = SEED) -> dict[str, str]:
    """File name to content, for both splits. No order is in both, so no prompt is either."""
    rng = Random(seed)
    source = orders(rng)
    return {
        name: "".join(row(next(source), rng) for _ in range(rows))
        for name, rows in (("train.jsonl", TRAIN_ROWS), ("test.jsonl", TEST_ROWS))
    }
