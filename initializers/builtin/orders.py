"""`builtin://orders`, the embedded instruction data set.

Each row is a chat: the user gives an order in plain English, the assistant answers with that order
as compact JSON. Pure standard library, and a function of the seed alone: the same seed gives the
same bytes on every platform, so a test can hold the committed files to this code.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random

SEED = 20261121
TRAIN_ROWS = 3000
TEST_ROWS = 300


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Aisha Amir Anna Ben Carla Chen Clara Daniel Diego Elena Emma Erik Fatima Felix Grace Hana "
    "Hugo Ines Ivan Jack Jonas José Julia Karim Kate Lea Leo Lina Lucas Maria Marta Max Mei Mia "
    "Nadia Nina Noah Omar Oscar Paula Pedro Priya Rosa Ruth Sam Sara Sofia Tom Vera Yusuf Zoë"
)
ITEMS = _words(
    "apron bag belt blanket bottle bowl box brush candle cap chair clock cup glass hat jacket jar "
    "kettle lamp mirror mug notebook pen pillow plate poster ring shirt spoon towel umbrella vase"
)
COLORS = _words("beige black blue brown gold green grey orange pink purple red silver white yellow")
NUMBER_WORDS = _words("one two three four five six seven eight nine ten eleven twelve")
FIXED_AMOUNTS = {2: "a pair of", 12: "a dozen"}

INSTRUCTIONS = (
    "Turn this order into JSON:",
    "Extract the order as JSON:",
    "Write this order as JSON:",
    "Convert the order to JSON:",
    "Give me this order as a JSON object:",
)
# {goods} is "3 red mugs"; the others let the parts stand apart, so that position alone is no clue.
SENTENCES = (
    "{name} would like {goods}, please.",
    "{name} wants to buy {goods}.",
    "{name} ordered {goods} this morning.",
    "{name} called and asked for {goods}.",
    "Please send {goods} to {name}.",
    "Could you ship {goods} to {name}?",
    "Add {goods} to the basket of {name}.",
    "We sold {goods} to {name} today.",
    "I need {goods}. My name is {name}.",
    "Hi, {name} here. Can I get {goods}?",
    "This is {name}. I am looking for {goods}.",
    "The customer is {name} and the order is {goods}.",
    "{name} needs {amount} {things} in {color}.",
    "{name} picked {amount} {things}, color {color}.",
    "For {name}: {amount} {things}, {color}, as soon as possible.",
    "Send {name} {amount} {things}. The color should be {color}.",
)


@dataclass(frozen=True)
class Order:
    """One order; the field order is the key order of the answer."""

    name: str
    item: str
    color: str
    quantity: int

    def answer(self) -> str:
        """The assistant's answer: compact JSON, e.g. `{"name":"Anna","item":"mug",...}`."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))


def plural(item: str) -> str:
    """The plural of an item; ITEMS holds regular nouns only."""
    return item + ("es" if item.endswith(("s", "x", "sh", "ch")) else "s")


def amount(quantity: int, following: str, rng: Random) -> str:
    """A quantity in digits or words; `following` (the next word) decides between "a" and "an"."""
    spellings = [str(quantity), NUMBER_WORDS[quantity - 1]]
    if quantity == 1:
        spellings.append("an" if following[0] in "aeiou" else "a")
    elif quantity in FIXED_AMOUNTS:
        spellings.append(FIXED_AMOUNTS[quantity])
    return rng.choice(spellings)


def sentence(order: Order, rng: Random) -> str:
    """An order as a customer or a clerk would say it."""
    chosen = rng.choice(SENTENCES)
    things = order.item if order.quantity == 1 else plural(order.item)
    following = order.color if "{goods}" in chosen else things
    count = amount(order.quantity, following, rng)
    return chosen.format(
        name=order.name,
        amount=count,
        things=things,
        color=order.color,
        goods=f"{count} {order.color} {things}",
    )


def question(order: Order, rng: Random) -> str:
    """The user's message for an order: an instruction and a sentence."""
    text = sentence(order, rng)
    return f"{rng.choice(INSTRUCTIONS)} {text}"


def orders(rng: Random) -> Iterator[Order]:
    """Orders without end, none twice."""
    seen: set[Order] = set()
    while True:
        order = Order(
            name=rng.choice(NAMES),
            item=rng.choice(ITEMS),
            color=rng.choice(COLORS),
            quantity=rng.randint(1, len(NUMBER_WORDS)),
        )
        if order not in seen:
            seen.add(order)
            yield order


def row(order: Order, rng: Random) -> str:
    """One line of JSON Lines: `{"messages": [user, assistant]}`."""
    messages = [
        {"role": "user", "content": question(order, rng)},
        {"role": "assistant", "content": order.answer()},
    ]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def generate(seed: int = SEED) -> dict[str, str]:
    """File name to content, for both splits. No order is in both, so no prompt is either."""
    rng = Random(seed)
    source = orders(rng)
    return {
        name: "".join(row(next(source), rng) for _ in range(rows))
        for name, rows in (("train.jsonl", TRAIN_ROWS), ("test.jsonl", TEST_ROWS))
    }
