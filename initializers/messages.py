"""What readers of rows share: the few forms that training knows, messages, and how their faults are collected."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blueprints.errors import Fault

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose assistant turns from message `trained_from` on carry loss.

    A message with `weight: 0` (OpenAI's field) does not.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    trained_from: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its completion, as plain strings."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """An Alpaca row: an instruction, an optional input, the output."""

    instruction: str
    input: str
    output: str
    system: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; all of it is trained."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """One question with a better and a worse answer.

    Attributes:
        chosen: question and better answer; a conversation ends in the answer, its only trained message.
        rejected: the same question and the worse answer.
        transcript: both as text, for a model without a chat template; None if the row is no transcript.
    """

    chosen: Chat | Pair
    rejected: Chat | Pair
    transcript: tuple[Pair, Pair] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model answers in training.

    Attributes:
        asked: the question; a pair's completion and an instruction's output are empty.
        columns: the row's other columns, for reward functions.
        reference: the right answer as text, empty if the row has none.
    """

    asked: Chat | Pair | Instruction
    columns: dict[str, Any]
    reference: str = ""


Answered = Chat | Pair | Instruction | Text
Example = Answered | Preference | Prompt


def question(example: Example) -> str:
    """What a row asks, as a person reads it: the last user turn, the prompt or the instruction; empty for plain text."""
    if isinstance(example, Preference):
        return question(example.chosen)
    if isinstance(example, Prompt):
        return question(example.asked)
    if isinstance(example, Pair):
        return example.prompt
    if isinstance(example, Instruction):
        return f"{example.instruction}\n{example.input}".strip()
    turns = example.messages if isinstance(example, Chat) else []
    return next((str(turn["content"]) for turn in reversed(turns) if turn["role"] == "user"), "")


def answer(example: Chat | Pair) -> str:
    """The text of the last answer."""
    return example.completion if isinstance(example, Pair) else str(example.messages[-1]["content"])


def size_of(example: Example) -> int:
    """Characters of a row's texts, about."""
    if isinstance(example, Preference):
        return size_of(example.chosen) + size_of(example.rejected)
    if isinstance(example, Prompt):
        return size_of(example.asked)
    if isinstance(example, Chat):
        return sum(len(message["content"]) for message in example.messages)
    if isinstance(example, Pair):
        return len(example.prompt) + len(example.completion)
    if isinstance(example, Instruction):
        return len(example.instruction) + len(example.input) + len(example.output)
    return len(example.text)


ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
SHAREGPT_ROLES = ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "start": ("user",),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool",),
    "tool": ("tool", "assistant"),
}
"""Roles that may come after each role; `call` is an assistant turn that calls tools."""


class Reporter:
    """Collects the faults of one row.

    Args:
        where: the row's place.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.faults: list[Fault] = []

    def __call__(self, key: str, problem: str, expected: str = "", hint: str = "") -> None:
        self.faults.append(Fault(self.where, key, problem, expected, hint))

    def text(self, row: Mapping[str, Any], key: str, path: str = "", *, empty: bool = False) -> str | None:
        """The string `row[key]`; None, with a fault, if it is missing, of another type, empty or not Unicode."""
        path = path or key
        if key not in row:
            near = difflib.get_close_matches(key, [str(name) for name in row], 1)
            column = path == key  # below a column nothing can be mapped
            hint = f"did you mean {near[0]!r}?" + (" Map it with dataset.columns" if column else "") if near else ""
            self(path, f"missing; the {'row' if column else 'message'} has {names_of(row)}", "a string", hint)
            return None
        value = row[key]
        if not isinstance(value, str):
            self(path, described(value), "a string" if empty else "a string that is not empty")
            return None
        if not empty and not value.strip():
            self(path, f"{shown(value)} is empty", "a string that is not empty")
            return None
        return value if self.unicode(value, path) else None

    def unicode(self, value: str, path: str) -> bool:
        """Whether a string is encodable text (JSON can smuggle in half a surrogate pair)."""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(value[error.start]):04x}"
            self(path, f"{code} at character {error.start + 1} is half of a surrogate pair", "Unicode text")
            return False
        return True


def shown(value: object, limit: int = 60) -> str:
    """A value for a message: as JSON, on one line, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=repr)
    except ValueError:
        text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def described(value: object) -> str:
    """A value of a wrong type, for a message: `5 is a number`."""
    return "found null" if value is None else f"{shown(value)} is {type_name(value)}"


def type_name(value: object) -> str:
    """The type of a value in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else type(value).__name__


def names_of(row: Mapping[str, Any]) -> str:
    return ", ".join(str(name) for name in list(row)[:12]) or "no columns"


# --- messages ------------------------------------------------------------------------------------


def json_cell(value: Any) -> Any:
    """A list or object written as JSON text, as cells of CSV and columns of Parquet often hold it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def message_list(row: Mapping[str, Any], key: str, report: Reporter) -> list[Any] | None:
    if key not in row:
        report(key, f"missing; the row has {names_of(row)}", "a list of messages")
        return None
    value = json_cell(row[key])
    if not isinstance(value, list):
        report(key, described(value), "a list of messages")
        return None
    if not value:
        report(key, "the list is empty", "at least a user's and an assistant's message")
        return None
    return value


def tools_of(row: Mapping[str, Any], report: Reporter) -> list[dict[str, Any]] | None:
    value = json_cell(row.get("tools"))
    if value is None or value == [] or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        report("tools", described(value), "a list of tool definitions (JSON Schema objects)")
        return None
    return value


def _content(message: Mapping[str, Any], path: str, role: str, calls: bool, report: Reporter) -> str | None:
    """A message's text; OpenAI's list of text parts is joined."""
    value = message.get("content")
    if value is None and role == "assistant" and calls:
        return ""
    if isinstance(value, list):
        parts = []
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                report(f"{path}[{index}]", f"{shown(part)} is no text", '{"type": "text", "text": "…"}')
                return None
            parts.append(part["text"])
        value = "".join(parts)
    may_be_empty = role in ("system", "developer", "tool") or (role == "assistant" and calls)
    if "content" in message:
        message = {"content": value}
    return report.text(message, "content", path, empty=may_be_empty)


def message_of(item: Any, path: str, report: Reporter) -> Message | None:
    """One OpenAI message, checked by itself."""
    if not isinstance(item, dict):
        report(path, described(item), 'an object with "role" and "content"')
        return None
    role = _role(item, "role", path, ROLES, report)
    if role is None:
        return None
    message = {key: value for key, value in item.items() if value is not None}
    calls = _tool_calls(message, role, path, report)
    content = _content(item, f"{path}.content", role, calls, report)
    if "weight" in message and message["weight"] not in (0, 1):
        report(f"{path}.weight", f"{shown(message['weight'])}", "0 or 1")
    for key in ("reasoning_content", "thinking"):
        if key in message:
            report.text(message, key, f"{path}.{key}", empty=True)
    return None if content is None else message | {"role": role, "content": content}


def _role(item: Mapping[str, Any], key: str, path: str, known: Mapping[str, str], report: Reporter) -> str | None:
    name = report.text(item, key, f"{path}.{key}")
    if name is None:
        return None
    role = known.get(name.strip().lower()) if known is SHAREGPT_ROLES else known.get(name)
    if role is None:
        near = difflib.get_close_matches(name.lower(), list(known), 1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        report(f"{path}.{key}", f"unknown role {shown(name)}", f"one of {', '.join(known)}", hint)
    return role


def _tool_calls(message: Message, role: str, path: str, report: Reporter) -> bool:
    """Whether the message calls tools; its calls are checked and their arguments read if they are JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return False
    path = f"{path}.tool_calls"
    if role != "assistant":
        report(path, f"a {role} message has tool calls", "them in assistant messages")
    if not isinstance(calls, list):
        report(path, described(calls), "a list")
        return True
    message["tool_calls"] = [_tool_call(call, f"{path}[{index}]", report) for index, call in enumerate(calls)]
    return True


def _tool_call(call: Any, path: str, report: Reporter) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        report(path, f"{shown(call)} names no function", '{"function": {"name": …, "arguments": …}}')
        return call
    arguments = json_cell(function.get("arguments"))
    if arguments is not None and not isinstance(arguments, dict):
        report(f"{path}.function.arguments", f"{shown(arguments)}", "a JSON object")
        return call
    # Templates print arguments as JSON themselves: text would come out quoted twice.
    function = {key: value for key, value in function.items() if value is not None} | {"arguments": arguments or {}}
    return call | {"function": function} if "function" in call else function


def check_turns(
    messages: Sequence[Message | None], key: str, report: Reporter, *, state: str = "start", last: bool = True
) -> str:
    """Check the order of roles; returns the state after the last message.

    Args:
        messages: the messages; None where one was faulty by itself.
        key: the field's path.
        report: gets the faults.
        state: what came before.
        last: the last message must be the assistant's.
    """
    for index, message in enumerate(messages):
        if message is None:
            return state
        role = message["role"]
        allowed = _FOLLOWS[state]
        if role in ("system", "developer"):
            if state != "start" or index:
                report(f"{key}[{index}].role", f"a {role} message after others", "it first")
                return state
        elif role not in allowed:
            after = "at the start" if state == "start" else f"after {_STATE_NAMES.get(state, state)}"
            report(f"{key}[{index}].role", f"{role!r} {after}", " or ".join(repr(name) for name in allowed))
            return state
        state = "call" if role == "assistant" and message.get("tool_calls") else role
    if last and messages and messages[-1] is not None and messages[-1]["role"] != "assistant":
        index = len(messages) - 1
        report(f"{key}[{index}].role", f"the last message is the {messages[-1]['role']}'s", "the assistant's")
    return state


_STATE_NAMES = {
    "call": "an assistant's tool call",
    "system": "the system message",
    "developer": "the developer message",
}


def any_message(item: Any, path: str, report: Reporter) -> Message | None:
    """A message in OpenAI's (role, content) or ShareGPT's (from, value) spelling, whatever the column is called."""
    if not isinstance(item, dict):
        report(path, described(item), 'an object with "role" and "content"')
        return None
    if "from" not in item:
        return message_of(item, path, report)
    if item.get("from") == "function_call":
        call = json_cell(item.get("value"))
        checked = _tool_call(call, f"{path}.value", report)
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": checked}]}
    role = _role(item, "from", path, SHAREGPT_ROLES, report)
    value = report.text(item, "value", f"{path}.value", empty=role in ("system", "tool"))
    message = {} if item.get("weight") is None else {"weight": item["weight"]}
    return None if role is None or value is None else message | {"role": role, "content": value}


def message_cell(value: Any) -> Any:
    """A list of messages written as JSON text; other text that happens to look like JSON stays text."""
    read = json_cell(value)
    is_messages = isinstance(read, list) and read and all(isinstance(item, dict) and "role" in item for item in read)
    return read if is_messages or isinstance(value, list) else value
