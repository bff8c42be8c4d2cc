"""The rewards that PPO and GRPO know by name, and the arguments of each: what a recipe may say.

What they compute is in `trainers.rewards`. A reward of one's own is named `package.module:function`; its arguments are
its own affair.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blueprints.recipe.document import describe_value
from blueprints.recipe.schema import CUSTOM_METHOD, RewardFunction

ANSWER = "answer"
"""The column with the right answer, unless `args.column` names another."""
UNITS = ("tokens", "words", "characters")
"""What the reward `length` counts."""

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every reward function is called with, beside the columns of the rows."""

Problem = str | None
"""What is wrong with a value; None if nothing is."""


@dataclass(frozen=True)
class Argument:
    """One argument of a named reward.

    Attributes:
        expected: what it takes, in plain words.
        check: what is wrong with a value that is given.
        doc: what it does.
        default: its value where the recipe gives none.
        required: whether the recipe must give one.
    """

    expected: str
    check: Callable[[Any], Problem]
    doc: str
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class NamedReward:
    """A reward known by name.

    Attributes:
        doc: what it rewards, and with which number.
        arguments: what `args` may hold.
    """

    doc: str
    arguments: Mapping[str, Argument]


def _is(kind: type | tuple[type, ...], *, at_least: float | None = None) -> Callable[[Any], Problem]:
    """A check of type and, for numbers, of the smallest value."""

    def check(value: Any) -> Problem:
        boolean = isinstance(value, bool) and kind is not bool
        low = at_least is not None and isinstance(value, int | float) and value < at_least
        return f"found {describe_value(value)}" if boolean or not isinstance(value, kind) or low else None

    return check


def _one_of(*choices: str) -> Callable[[Any], Problem]:
    return lambda value: None if isinstance(value, str) and value in choices else f"found {describe_value(value)}"


def _text(value: Any) -> Problem:
    return None if isinstance(value, str) and value else f"found {describe_value(value)}"


def _share(value: Any) -> Problem:
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1
    return f"found {describe_value(value)}" if wrong else None


def _pattern(value: Any) -> Problem:
    if not isinstance(value, str) or not value:
        return f"found {describe_value(value)}"
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        return f"{value!r} is no regular expression: {error}"
    return None


def _tags(value: Any) -> Problem:
    fits = isinstance(value, list) and value and all(isinstance(tag, str) and tag.isidentifier() for tag in value)
    return None if fits else f"found {describe_value(value)}"


def _schema(value: Any) -> Problem:
    if not isinstance(value, dict):
        return f"found {describe_value(value)}"
    from jsonschema import Draft202012Validator, SchemaError  # the one recipe in a hundred that needs it pays for it

    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path)
        return f"not a JSON schema: {error.message}" + (f" (at {place.lstrip('.')})" if place else "")
    return _unresolved(value)


def _unresolved(schema: dict[str, Any]) -> Problem:
    """A reference that leads out of the schema, or nowhere: nothing is fetched."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, Schema, SchemaRegistry

    registry: SchemaRegistry = Registry()
    root = registry.resolver_with_root(DRAFT202012.create_resource(schema))
    found: list[Schema] = [schema]
    while found:
        part: Any = found.pop()
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            try:
                root.lookup(part["$ref"])
            except Unresolvable:
                return f"the reference {part['$ref']!r} leads to no part of the schema"
        found += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return None


_COLUMN = Argument("the name of a column", _text, "Column of the row with the right answer.", ANSWER)

REWARDS: dict[str, NamedReward] = {
    "exact_match": NamedReward(
        "1 if the completion is the column's value, white space around both aside, else 0. Of a list any item counts.",
        {
            "column": _COLUMN,
            "ignore_case": Argument("a boolean", _is(bool), "Take capital and small letters for the same.", False),
        },
    ),
    "numeric_match": NamedReward(
        "1 if a number in the completion equals the last number in the column, else 0. `1,234`, `$12.50` and `50%` are "
        "read as numbers.",
        {
            "column": _COLUMN,
            "which": Argument("`last`, `first` or `any`", _one_of("last", "first", "any"), "Which number.", "last"),
            "tolerance": Argument(
                "a number of at least 0", _is((int, float), at_least=0), "Largest difference that counts as equal.", 0.0
            ),
        },
    ),
    "regex": NamedReward(
        "1 if the completion fits a regular expression, else 0.",
        {
            "pattern": Argument(
                "a regular expression",
                _pattern,
                "The expression, as Python's `re` has it. `(?s)` lets a dot match line breaks, `(?i)` ignores case.",
                required=True,
            ),
            "mode": Argument(
                "`search` or `fullmatch`",
                _one_of("search", "fullmatch"),
                "Anywhere in the completion, or the whole of it, white space around it aside.",
                "search",
            ),
        },
    ),
    "json_schema": NamedReward(
        "1 if the completion is JSON that fits a JSON schema, `valid_json` if it is other JSON, else 0.",
        {
            "schema": Argument(
                "a JSON schema (draft 2020-12) as a map", _schema, "The schema. Default: any JSON.", default={}
            ),
            "valid_json": Argument("a number from 0 to 1", _share, "For JSON that does not fit the schema.", 0.0),
        },
    ),
    "format": NamedReward(
        "1 if the completion is the tags in their order and nothing else, each opened and closed once, else 0: for "
        "`[think, answer]` `<think>...</think><answer>...</answer>`.",
        {"tags": Argument("a list of tag names, such as [think, answer]", _tags, "The tags.", required=True)},
    ),
    "length": NamedReward(
        "1 if the completion is neither shorter than `min` nor longer than `max`; less, in proportion, outside: 0 when "
        "it is empty or twice as long as `max`.",
        {
            "min": Argument("an integer of at least 1", _is(int, at_least=1), "Shortest length."),
            "max": Argument("an integer of at least 1", _is(int, at_least=1), "Longest length."),
            "unit": Argument("`tokens`, `words` or `characters`", _one_of(*UNITS), "What is counted.", "tokens"),
        },
    ),
}
"""Every reward that has a name."""


@dataclass(frozen=True)
class RewardFault:
    """What is wrong with one reward of a recipe.

    Attributes:
        key: where, below the reward: `name`, `weight`, `args` or `args.NAME`.
        problem, expected, hint: as a `Fault` has them.
    """

    key: str
    problem: str
    expected: str = ""
    hint: str = ""


def is_own(name: str) -> bool:
    """Whether a reward's name has the form of a function of one's own, `package.module:function`."""
    return re.fullmatch(CUSTOM_METHOD, name) is not None


def reward_faults(reward: RewardFunction) -> Iterator[RewardFault]:
    """What is wrong with one reward: its name, its arguments."""
    if is_own(reward.name):
        taken = [name for name in reward.args if name in RESERVED]
        for name in taken:
            yield RewardFault(f"args.{name}", f"every reward gets `{name}` already", "another name")
        return
    known = REWARDS.get(reward.name)
    if known is None:
        folded = reward.name.lower().replace("-", "_")
        near = difflib.get_close_matches(folded, REWARDS, 1, 0.5)
        hint = f"Did you mean `{near[0]}`?" if near else ""
        expected = f"one of {', '.join(REWARDS)}, or your own `package.module:function`"
        yield RewardFault("name", f"found {describe_value(reward.name)}", expected, hint)
        return
    yield from _argument_faults(reward, known)


def _argument_faults(reward: RewardFunction, known: NamedReward) -> Iterator[RewardFault]:
    for name, value in reward.args.items():
        argument = known.arguments.get(name)
        if argument is None:
            yield RewardFault(
                f"args.{name}", "unknown key", f"an argument of `{reward.name}`", nearest(name, known.arguments)
            )
        elif (problem := argument.check(value)) is not None:
            yield RewardFault(f"args.{name}", problem, argument.expected)
    for name, argument in known.arguments.items():
        if argument.required and name not in reward.args:
            yield RewardFault(f"args.{name}", "required, but missing", argument.expected)
    if reward.name == "length":
        yield from _limit_faults(reward.args)


def _limit_faults(args: Mapping[str, Any]) -> Iterator[RewardFault]:
    low, high = args.get("min"), args.get("max")
    if low is None and high is None:
        yield RewardFault("args.max", "required, but missing", "`max`, `min` or both", "Such as `args: {max: 100}`.")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        yield RewardFault("args.min", f"found {low}, more than `max`, which is {high}", f"at most {high}")


def nearest(name: str, known: Collection[str]) -> str:
    """A sentence that leads from an unknown argument to the right one."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1, 0.5)
    return f"Did you mean `{near[0]}`?" if near else f"Its arguments: {', '.join(known)}."


def arguments(reward: RewardFunction) -> dict[str, Any]:
    """All arguments of a named reward, defaults filled in; of a function of one's own those the recipe gives."""
    known = REWARDS.get(reward.name)
    defaults = {name: argument.default for name, argument in known.arguments.items()} if known else {}
    return defaults | reward.args


def shown_names(rewards: Sequence[RewardFunction]) -> list[str]:
    """A short name for each reward, as curves and tables show it: its own, of a function what comes after the colon.

    A name that comes twice gets a number: `regex`, `regex_2`.
    """
    found: list[str] = []
    for reward in rewards:
        base = reward.name.rpartition(":")[2]
        count = 1
        name = base
        while name in found:
            count += 1
            name = f"{base}_{count}"
        found.append(name)
    return found
