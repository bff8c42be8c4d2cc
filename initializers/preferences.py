"""Rows of preferences: one question, a better answer and a worse one, in the spellings that data sets have.

An answer is one message of the assistant. Where whole conversations are given (the prompt is implicit), they must be
equal but for their last message: every token of the answers counts in the loss, so nobody else may speak in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

from initializers.messages import (
    Chat,
    Message,
    Pair,
    Preference,
    Reporter,
    any_message,
    check_turns,
    described,
    json_cell,
    message_cell,
    shown,
    tools_of,
)

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
RANKED = ("responses", "completions")
"""Columns that hold several answers."""
RANKS = {"rank": min, "scores": max}
"""Columns that order them, and which of their numbers is the best."""


@dataclass(frozen=True)
class _Names:
    """The columns that the parts of a row come from, for messages."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


def read_preference(row: Mapping[str, Any], report: Reporter) -> Preference | None:
    """The preference in a row; None, with faults, if there is none."""
    names = _Names()
    if "chosen" not in row and "rejected" not in row and any(key in row for key in RANKED):
        ranked = _best_and_worst(row, report)
        if ranked is None:
            return None
        row, names = ranked
    prompt, chosen, rejected = (message_cell(row.get(key)) for key in ("prompt", "chosen", "rejected"))
    for key, value, name in (("chosen", chosen, names.chosen), ("rejected", rejected, names.rejected)):
        if not isinstance(value, list):
            report.text(row, key, "" if name == key else name)
    if prompt is not None and not isinstance(prompt, list):
        report.text(row, "prompt")
    if report.faults:
        return None
    found = _read(row, prompt, chosen, rejected, names, report)
    if found is not None and _same(found):
        report(names.rejected, "the two answers are the same", "an answer that is worse than the chosen one")
    return None if report.faults else found


def _read(
    row: Mapping[str, Any], prompt: Any, chosen: Any, rejected: Any, names: _Names, report: Reporter
) -> Preference | None:
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        if prompt is None:
            return _from_texts(chosen, rejected, row, report)
        if not _is_transcript(prompt) and not row.get("system"):
            return Preference(Pair(prompt, chosen), Pair(prompt, rejected))
        if _is_transcript(prompt):
            pairs = (Pair(prompt, chosen), Pair(prompt, rejected))
            prompt = _turns_of(prompt)
            if prompt[-1]["role"] != "assistant" or prompt.pop()["content"]:
                report(names.prompt, "the transcript does not end where the assistant answers", '"…\\n\\nAssistant:"')
                return None
            return _from_messages(row, prompt, chosen.strip(), rejected.strip(), names, report, pairs)
    return _from_messages(row, prompt, chosen, rejected, names, report)


def _same(found: Preference) -> bool:
    if isinstance(found.chosen, Pair) or isinstance(found.rejected, Pair):
        assert isinstance(found.chosen, Pair)
        assert isinstance(found.rejected, Pair)
        return found.chosen.completion.strip() == found.rejected.completion.strip()
    one, other = (
        message | {"content": str(message["content"]).strip()}
        for message in (found.chosen.messages[-1], found.rejected.messages[-1])
    )
    return one == other


# --- ranked answers --------------------------------------------------------------------------------


def _best_and_worst(row: Mapping[str, Any], report: Reporter) -> tuple[dict[str, Any], _Names] | None:
    """A ranked row as a pair: the best answer against the worst, the clearest of its contrasts."""
    key = next(key for key in RANKED if key in row)
    order = next((name for name in RANKS if row.get(name) is not None), None)
    answers = json_cell(row[key])
    if not isinstance(answers, list) or len(answers) < 2:
        report(key, described(answers), "a list of two answers or more")
        return None
    if order is None:
        report("rank", "missing", f"a list of {len(answers)} numbers, 1 the best; or scores, the highest the best")
        return None
    numbers = json_cell(row[order])
    if not isinstance(numbers, list) or not all(_is_number(number) for number in numbers):
        report(order, described(numbers), "a list of numbers")
        return None
    if len(numbers) != len(answers):
        report(order, f"{len(numbers)} numbers for {len(answers)} answers", "one for each answer")
        return None
    if min(numbers) == max(numbers):
        report(order, f"all answers have {shown(numbers[0])}", "a best and a worst answer")
        return None
    best = numbers.index(RANKS[order](numbers))
    worst = numbers.index((max if RANKS[order] is min else min)(numbers))
    names = _Names(chosen=f"{key}[{best}]", rejected=f"{key}[{worst}]")
    return dict(row) | {"chosen": answers[best], "rejected": answers[worst]}, names


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not isnan(value)


# --- texts without a prompt of their own -----------------------------------------------------------


def _is_transcript(text: str) -> bool:
    found = _TURN.match(text)
    return found is not None and found[1] == "Human"


def _turns_of(text: str) -> list[Message]:
    """The turns of `\\n\\nHuman: … \\n\\nAssistant: …`, white space around them removed."""
    marks = list(_TURN.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": _SPEAKERS[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def _from_texts(chosen: str, rejected: str, row: Mapping[str, Any], report: Reporter) -> Preference | None:
    """Two texts that begin alike: transcripts, or any other text up to a space before the first difference."""
    if _is_transcript(chosen) and _is_transcript(rejected):
        pairs = tuple(Pair(text[:at], text[at:]) for text in (chosen, rejected) if (at := _last_mark(text)) is not None)
        turns = _turns_of(chosen), _turns_of(rejected)
        transcript = (pairs[0], pairs[1]) if len(pairs) == 2 else None
        return _from_messages(row, None, *turns, _Names(), report, transcript)
    if chosen == rejected:
        report("rejected", "the two answers are the same", "an answer that is worse than the chosen one")
        return None
    different = (at for at, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1])
    common = chosen[: next(different, min(len(chosen), len(rejected)))]
    prompt = common[: max(common.rfind(" "), common.rfind("\n")) + 1].rstrip()
    if not prompt:
        report(
            "prompt",
            "missing, and chosen and rejected do not begin alike",
            "a column with the question, or two texts that begin with it",
            "Map its name with dataset.columns, such as dataset.columns={prompt: question}",
        )
        return None
    return Preference(Pair(prompt, chosen[len(prompt) :]), Pair(prompt, rejected[len(prompt) :]))


def _last_mark(text: str) -> int | None:
    """Where the last answer of a transcript begins."""
    *_, last = _TURN.finditer(text)
    return last.end() if last[1] == "Assistant" else None


# --- messages --------------------------------------------------------------------------------------


def _from_messages(
    row: Mapping[str, Any],
    prompt: Any,
    chosen: Any,
    rejected: Any,
    names: _Names,
    report: Reporter,
    transcript: tuple[Pair, Pair] | None = None,
) -> Preference | None:
    opening, state = _opening(row, prompt, names, report)
    if report.faults:
        return None
    sides = [
        _side(opening, state, value, name, report)
        for value, name in ((chosen, names.chosen), (rejected, names.rejected))
    ]
    if report.faults:
        return None
    one, other = sides
    tools = tools_of(row, report)
    for index, (left, right) in enumerate(zip(one[:-1], other[:-1], strict=False)):
        if left != right:
            report(f"{names.rejected}[{index}]", f"{shown(right['content'])} is another message than in the chosen "
                   "conversation", "the same question for both answers; only the last message may differ")  # fmt: skip
            return None
    if len(one) != len(other):
        report(names.rejected, f"{len(other)} messages, {len(one)} in the chosen conversation",
               "the same question for both answers; only the last message may differ")  # fmt: skip
        return None
    last = len(one) - 1
    return Preference(Chat(one, tools, last), Chat(other, tools, last), transcript)


def _opening(row: Mapping[str, Any], prompt: Any, names: _Names, report: Reporter) -> tuple[list[Message], str]:
    """The messages of the column `prompt`, after those of the column `system`, and who spoke last in them."""
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    found = [any_message(item, f"{names.prompt}[{index}]", report) for index, item in enumerate(items)]
    messages = [message for message in found if message is not None]
    start = "start"
    if row.get("system") and not any(message["role"] == "system" for message in messages):
        start = "system"
    state = check_turns(messages, names.prompt, report, state=start, last=False)
    if messages and messages[-1]["role"] == "assistant":
        report(names.prompt, "the last message is the assistant's", "the user's: the answers are chosen and rejected")
    system = [{"role": "system", "content": report.text(row, "system")}] if start == "system" else []
    return [*system, *messages], state


def _side(opening: list[Message], state: str, value: Any, name: str, report: Reporter) -> list[Message]:
    """The whole conversation of one answer; empty after a fault."""
    items = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
    if not items:
        report(name, "the list is empty", "an assistant's message")
        return []
    found = [any_message(item, f"{name}[{index}]", report) for index, item in enumerate(items)]
    messages = [message for message in found if message is not None]
    if len(messages) < len(found):
        return []
    if len(messages) == 1:
        check_turns(messages, name, report, state=state)
        return opening + messages
    if messages[0]["role"] == "assistant":
        problem = f"an answer of {len(messages)} messages"
        report(name, problem, "one message of the assistant: every token of it counts in the loss")
        return []
    if not _begins_with(messages, opening):
        report(name, "the conversation begins otherwise than the column prompt", "the same question in both")
        return []
    check_turns(messages, name, report)
    system = opening[:1] if opening and opening[0]["role"] == "system" != messages[0]["role"] else []
    return system + messages


def _begins_with(messages: list[Message], opening: list[Message]) -> bool:
    """Whether a conversation holds the question that the column `prompt` states: all of it, or its user's words."""
    asked = [message for message in opening if message["role"] != "system"]
    own = [message for message in messages if message["role"] != "system"]
    same = [_said(message) for message in own[: len(asked)]] == [_said(message) for message in asked]
    return same or (len(asked) == 1 and any(_said(message) == _said(asked[0]) for message in own[:-1]))


def _said(message: Message) -> tuple[str, str]:
    return message["role"], str(message["content"]).strip()
