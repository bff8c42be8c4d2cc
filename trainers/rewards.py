"""Rewards of completions: those with a name, functions of the user's own, and their weighted sum.

A reward function has TRL's form: it is called with `prompts`, `completions`, `completion_ids`, every column of the rows
as a list, and the recipe's `args`, all by keyword, and returns one number per completion; None where it does not apply.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from blueprints.errors import DataError, UsageError
from blueprints.recipe.rewards import RESERVED, arguments, is_own, nearest, shown_names
from blueprints.recipe.schema import RewardFunction
from trainers.functions import load_function

Text = str | list[dict[str, Any]]
"""A prompt or a completion: text, or a list of messages where the rows' prompts are messages."""
Score = float | None


@dataclass(frozen=True)
class Answer:
    """One completion, as a named reward sees it: its text, its tokens, the columns of its row."""

    text: str
    ids: Sequence[int]
    row: Mapping[str, Any]


class Reward:
    """One reward of the recipe; every result is checked.

    Args:
        spec: as the recipe has it.
        name: how curves and tables call it.
        key: the recipe's key, for errors.

    Raises:
        UsageError: the module or the function does not exist.
    """

    def __init__(self, spec: RewardFunction, name: str, key: str) -> None:
        self.spec, self.key, self.weight = spec, key, float(spec.weight)
        self.__name__ = name  # TRL names metrics by it
        self.args = arguments(spec)
        self.own = load_function(spec.name, where=f"{key}.name") if is_own(spec.name) else None

    def check(self, columns: Collection[str]) -> None:
        """Refuse, before anything is trained, what a call could not give to the function.

        Args:
            columns: the columns of the rows.

        Raises:
            UsageError: the function needs a parameter that nothing fills, or takes no such argument.
        """
        if self.own is None:
            return
        try:
            parameters = inspect.signature(self.own).parameters.values()
        except ValueError:  # a function written in C may have none
            return
        named = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
        given = {*RESERVED, *columns, *self.args}
        for each in parameters:
            required = each.default is each.empty and each.kind is not each.VAR_KEYWORD
            if required and (each.kind is each.POSITIONAL_ONLY or (each.name in named and each.name not in given)):
                raise UsageError(
                    f"{self.spec.name} needs a parameter {each.name!r}, which is neither a column of the rows "
                    f"({', '.join(sorted(columns)) or 'they have none'}) nor among `args`",
                    where=self.key,
                    todo="give it by `args`, map a column with `dataset.columns`, or give the parameter a default",
                )
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            for name in self.args:
                if name not in named:
                    hint = nearest(name, [each for each in named if each not in RESERVED])
                    raise UsageError(
                        f"{self.spec.name} takes no argument {name!r}", where=f"{self.key}.args", todo=hint
                    )

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
        **more: Any,
    ) -> list[Score]:
        """One number per completion, None where the reward does not apply.

        Args:
            prompts, completions: texts or lists of messages.
            completion_ids: their tokens.
            columns: of each completion, its row's columns.
            more: what else TRL gives to reward functions; those that ask for it get it.

        Raises:
            UsageError: the function raised an exception or returned something else.
        """
        if self.own is None:
            answers = [
                Answer(text_of(completion), ids, row)
                for completion, ids, row in zip(completions, completion_ids, columns, strict=True)
            ]
            return [NAMED[self.spec.name](answer, **self.args) for answer in answers]
        lists = {name: [row.get(name) for row in columns] for name in dict.fromkeys(n for row in columns for n in row)}
        known = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        return self._checked(self._called(self.own, lists | self.args | known | more), prompts, completions)

    def _called(self, function: Callable[..., Any], everything: dict[str, Any]) -> Any:
        try:
            found = function(**_accepted(function, everything))
            return asyncio.run(found) if inspect.iscoroutine(found) else found
        except Exception as error:  # what a user's function may raise has no bounds; none of it is swallowed
            form = "a text" if isinstance(everything["completions"][0], str) else "a list of messages"
            raise UsageError(
                f"{self.spec.name} raised {type(error).__name__}: {' '.join(str(error).split())}",
                where=_place(error, function) or self.key,
                todo=f"correct the function; it got {len(everything['completions'])} completions, each {form}: the "
                f"first is {_shown(everything['completions'][0])}",
            ) from error

    def _checked(self, found: Any, prompts: Sequence[Text], completions: Sequence[Text]) -> list[Score]:
        wanted = f"a list of {len(completions)} numbers, one per completion (None: does not apply)"
        values = found.tolist() if isinstance(found, np.ndarray | torch.Tensor) else found
        if not isinstance(values, list | tuple):
            raise self._refusal(f"returned {_shown(found)}, a {type(found).__name__}", wanted)
        if len(values) != len(completions):
            raise self._refusal(f"returned {len(values)} numbers for {len(completions)} completions", wanted)
        return [
            self._number(value, prompt, completion)
            for value, prompt, completion in zip(values, prompts, completions, strict=True)
        ]

    def _number(self, value: Any, prompt: Text, completion: Text) -> Score:
        if value is None:
            return None
        if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            value = value.item()
        at = f"for the completion {_shown(completion)} of the prompt {_shown(prompt)}"
        if not isinstance(value, int | float):
            raise self._refusal(f"returned {_shown(value)}, a {type(value).__name__}, {at}", "a number or None")
        if not math.isfinite(value):
            raise self._refusal(f"returned {value} {at}", "a finite number, or None where the reward does not apply")
        return float(value)

    def _refusal(self, what: str, wanted: str) -> UsageError:
        assert self.own is not None
        return UsageError(f"{self.spec.name} {what}", where=_defined(self.own) or self.key, todo=f"return {wanted}")


def load_rewards(specs: Sequence[RewardFunction], key: str) -> list[Reward]:
    """The recipe's rewards, functions of the user's own imported.

    Args:
        specs: as the recipe has them.
        key: the recipe's key, such as `grpo.reward_funcs`.
    """
    names = shown_names(specs)
    return [Reward(spec, name, f"{key}[{index}]") for index, (spec, name) in enumerate(zip(specs, names, strict=True))]


def check_columns(rewards: Sequence[Reward], columns: Iterable[str]) -> None:
    """The rewards can be called with the rows' columns.

    Args:
        columns: of each row, its columns as JSON.

    Raises:
        DataError: a column has the name of an argument of every reward.
        UsageError: a reward needs what the rows do not have.
    """
    names = {name for text in columns for name in json.loads(text)}
    for name in sorted(names & set(RESERVED)):
        raise DataError(
            f"the rows have a column {name!r}, which is the name of an argument that every reward gets",
            where="dataset",
            todo="rename the column",
        )
    for reward in rewards:
        reward.check(names)


def total(rewards: Sequence[Reward], scores: Sequence[Sequence[Score]]) -> list[Score]:
    """The weighted sum for each completion; None where no reward applies.

    Args:
        rewards: in the order of `scores`.
        scores: of each reward one number per completion.
    """
    found: list[Score] = []
    for given in zip(*scores, strict=True):
        counted = [reward.weight * score for reward, score in zip(rewards, given, strict=True) if score is not None]
        found.append(sum(counted) if counted else None)
    return found


def text_of(completion: Text) -> str:
    """The text of a prompt or a completion: of messages what they say, line by line."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message["content"]) for message in completion if message.get("content") is not None)


def _accepted(function: Callable[..., Any], everything: dict[str, Any]) -> dict[str, Any]:
    """Of `everything` what the function's signature takes."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return everything
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return everything
    return {name: value for name, value in everything.items() if name in parameters}


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """The deepest line of the traceback in the function's own file: where the user has to look."""
    frames = traceback.extract_tb(error.__traceback__)
    own = inspect.unwrap(function)
    home = own.__code__.co_filename if inspect.isfunction(own) else ""
    there = [frame for frame in frames if frame.filename == home] or [
        frame for frame in frames if frame.filename != __file__
    ]
    return f"{there[-1].filename}:{there[-1].lineno}" if there else ""


def _defined(function: Callable[..., Any]) -> str:
    own = inspect.unwrap(function)
    return f"{own.__code__.co_filename}:{own.__code__.co_firstlineno}" if inspect.isfunction(own) else ""


def _shown(value: Any, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


# --- the rewards that have a name, in the order of blueprints.recipe.rewards -----------------------


def exact_match(answer: Answer, *, column: str, ignore_case: bool) -> Score:
    """Whether the answer is the column's value."""
    right = _right_answers(answer.row, column)
    given = answer.text.strip()
    if ignore_case:
        given, right = given.casefold(), [each.casefold() for each in right]
    return float(given in right) if right else None


def _right_answers(row: Mapping[str, Any], column: str) -> list[str]:
    value = row.get(column)
    values = value if isinstance(value, list) else [value]
    texts = [
        each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values if each is not None
    ]
    return [text.strip() for text in texts]


NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])[-+]?\.\d+")
"""A number in a text: sign, thousands set off by commas, decimals, exponent. `$` and `%` beside it do not matter."""


def numbers_in(text: str) -> list[float]:
    """The numbers of a text, in their order."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def numeric_match(answer: Answer, *, column: str, which: str, tolerance: float) -> Score:
    """Whether a number of the answer is the last one of the column."""
    rights = [numbers_in(text)[-1] for text in _right_answers(answer.row, column) if numbers_in(text)]
    if not rights:
        return None
    given = numbers_in(answer.text)
    chosen = given if which == "any" else given[:1] if which == "first" else given[-1:]
    # Decimals are not exact in binary: 0.1 + 0.2 is no 0.3, and is meant to be.
    slack = [max(tolerance, 1e-9 * abs(right)) for right in rights]
    return float(any(abs(each - right) <= near for each in chosen for right, near in zip(rights, slack, strict=True)))


def regex(answer: Answer, *, pattern: str, mode: str) -> Score:
    """Whether the answer fits a regular expression."""
    found = re.fullmatch(pattern, answer.text.strip()) if mode == "fullmatch" else re.search(pattern, answer.text)
    return float(found is not None)


def json_schema(answer: Answer, *, schema: Mapping[str, Any], valid_json: float) -> Score:
    """Whether the answer is JSON that fits a schema."""
    try:
        value = json.loads(answer.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if _validator(json.dumps(schema, sort_keys=True)).is_valid(value) else float(valid_json)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")  # Python reads NaN and Infinity, which JSON does not have


@cache
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(json.loads(schema), registry=Registry())  # a registry of its own: nothing is fetched


def format_tags(answer: Answer, *, tags: Sequence[str]) -> Score:
    """Whether the answer is the tags in their order and nothing else."""
    parts = [rf"<{tag}>((?!</?(?:{'|'.join(tags)})>).)*</{tag}>" for tag in tags]
    return float(re.fullmatch(r"\s*".join(parts), answer.text.strip(), re.DOTALL) is not None)


def length(answer: Answer, *, min: int | None, max: int | None, unit: str) -> Score:
    """How near the answer's length is to the span from `min` to `max`."""
    size = {"tokens": len(answer.ids), "words": len(answer.text.split()), "characters": len(answer.text)}[unit]
    if min is not None and size < min:
        return size / min
    if max is not None and size > max:
        return 1 - (size - max) / max if size < 2 * max else 0.0
    return 1.0


NAMED: dict[str, Callable[..., Score]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "regex": regex,
    "json_schema": json_schema,
    "format": format_tags,
    "length": length,
}
"""The functions behind the names of `blueprints.recipe.rewards.REWARDS`."""
