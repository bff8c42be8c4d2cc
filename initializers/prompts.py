"""Rows of prompts: what the model answers in training, and the columns that rewards compare its answers with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blueprints.recipe.schema import Recipe, RewardFunction
from initializers.messages import (
    Chat,
    Example,
    Instruction,
    Message,
    Pair,
    Prompt,
    Reporter,
    any_message,
    check_turns,
    described,
    message_cell,
    message_list,
    shown,
    tools_of,
)

ANSWERS = ("answer", "solution", "completion")
"""Columns that hold the right answer, the first that a row has."""
ANSWER_REWARDS = ("exact_match", "numeric_match")
"""Rewards that compare with a column, `answer` unless `args.column` names another."""
Read = Callable[[Mapping[str, Any], Reporter], Example | None]


def read_prompt(row: Mapping[str, Any], report: Reporter) -> Prompt | None:
    """A row of the format `prompt`: a string or messages, and any other columns."""
    value = message_cell(row.get("prompt"))
    if isinstance(value, list) or row.get("system"):
        items = value if isinstance(value, list) else [{"role": "user", "content": report.text(row, "prompt")}]
        return None if report.faults else _from_items(row, "prompt", items, report)
    text = report.text(row, "prompt")
    return None if text is None else _prompt(row, Pair(text, ""), ("prompt",))


def prompt_reader(name: str, read: Read) -> Read:
    """A reader that cuts the last answer off the rows of another format: it becomes the reference."""
    key = {"messages": "messages", "sharegpt": "conversations"}.get(name)

    def reader(row: Mapping[str, Any], report: Reporter) -> Prompt | None:
        if key is not None and _asks(row, key):
            items = message_list(row, key, report)
            return None if items is None else _from_items(row, key, items, report)
        example = read(row, report)
        return None if example is None or report.faults else _without_answer(row, example)

    return reader


def _asks(row: Mapping[str, Any], key: str) -> bool:
    """Whether a conversation ends in a question."""
    items = message_cell(row.get(key))
    last = items[-1] if isinstance(items, list) and items else None
    return isinstance(last, dict) and last.get("role", last.get("from")) in ("user", "human", "tool", "observation")


def _from_items(row: Mapping[str, Any], key: str, items: Sequence[Any], report: Reporter) -> Prompt | None:
    if not items:
        report(key, "the list is empty", "at least a user's message")
        return None
    found = [any_message(item, f"{key}[{index}]", report) for index, item in enumerate(items)]
    messages: list[Message] = [message for message in found if message is not None]
    if len(messages) < len(found):
        return None
    state = "start"
    if row.get("system") and messages[0]["role"] != "system":
        system, state = report.text(row, "system"), "system"
        check_turns(messages, key, report, state=state, last=False)
        messages = [{"role": "system", "content": system}, *messages]
    else:
        check_turns(messages, key, report, last=False)
    role = messages[-1]["role"]
    if role not in ("user", "tool") and not report.faults:
        report(f"{key}[{len(items) - 1}].role", f"the last message is the {role}'s", "the user's: the model answers it")
    tools = tools_of(row, report)
    return None if report.faults else _prompt(row, Chat(messages, tools), (key,))


def _without_answer(row: Mapping[str, Any], example: Example) -> Prompt:
    if isinstance(example, Pair):
        return _prompt(row, Pair(example.prompt, ""), ("prompt",), example.completion)
    if isinstance(example, Instruction):
        asked = Instruction(example.instruction, example.input, "", example.system)
        return _prompt(row, asked, ("instruction", "input", "system"), example.output)
    assert isinstance(example, Chat)
    messages = example.messages[: example.trained_from or -1]
    key = next(name for name in ("messages", "conversations", "prompt") if name in row)
    return _prompt(row, Chat(messages, example.tools), (key,), str(example.messages[-1]["content"]))


def _prompt(
    row: Mapping[str, Any], asked: Chat | Pair | Instruction, used: Sequence[str], last: str | None = None
) -> Prompt:
    columns = {str(key): value for key, value in row.items() if key not in used}
    if last is not None and not _has(columns.get("answer")):
        columns["answer"] = last
    found = (
        columns[name] for name in ANSWERS if _has(columns.get(name)) and not isinstance(columns[name], list | dict)
    )
    value = next(found, last or "")
    return Prompt(asked, columns, value if isinstance(value, str) else shown(value, limit=1 << 20))


def _has(value: object) -> bool:
    return value is not None and (not isinstance(value, str) or bool(value.strip()))


# --- what rewards need -----------------------------------------------------------------------------


def needed_columns(recipe: Recipe) -> dict[str, str]:
    """The columns that the recipe's rewards compare answers with, and the reward that needs each."""
    own = recipe.grpo or recipe.ppo
    rewards: Sequence[RewardFunction] = own.reward_funcs if own else ()
    return {
        str(reward.args.get("column", "answer")): reward.name for reward in rewards if reward.name in ANSWER_REWARDS
    }


def check_columns_needed(prompt: Prompt, needed: Mapping[str, str], report: Reporter) -> None:
    """Report the columns that a reward needs and the row lacks."""
    for column, reward in needed.items():
        value = prompt.columns.get(column)
        if _has(value):
            continue
        there = column in prompt.columns
        others = [name for name in prompt.columns if name != column and _has(prompt.columns[name])]
        near = next((name for name in ("solution", "final_answer", "target", "label") if name in others), "")
        hint = (
            f"Map it: dataset.columns={{{column}: {near}}}, or give the reward args: {{column: {near}}}" if near else ""
        )
        problem = (described(value) if value is None else f"{shown(value)} is empty") if there else (
            f"missing; the row has {', '.join(others[:12]) or 'no other columns'}"
        )  # fmt: skip
        report(column, problem, f"the right answer, which the reward {reward} compares with", hint)
