"""Shapes of rows: recognised, checked field by field, and brought into the few forms that training knows.

Each format has one reader: it takes a raw row, reports every fault it finds with the path of the field, and returns a
`Chat`, a `Pair`, an `Instruction` or a `Text`. Which formats a method takes is a literal table.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blueprints.errors import DataError, Fault, UsageError

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


Example = Chat | Pair | Instruction | Text


def question(example: Example) -> str:
    """What a row asks, as a person reads it: the last user turn, the prompt or the instruction; empty for plain text."""
    if isinstance(example, Pair):
        return example.prompt
    if isinstance(example, Instruction):
        return f"{example.instruction}\n{example.input}".strip()
    turns = example.messages if isinstance(example, Chat) else []
    return next((str(turn["content"]) for turn in reversed(turns) if turn["role"] == "user"), "")


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
            self(path, f"missing; the {'row' if column else 'message'} has {_names(row)}", "a string", hint)
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


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(str(name) for name in list(row)[:12]) or "no columns"


# --- messages ------------------------------------------------------------------------------------


def _json_cell(value: Any) -> Any:
    """A list or object written as JSON text, as cells of CSV and columns of Parquet often hold it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _list(row: Mapping[str, Any], key: str, report: Reporter) -> list[Any] | None:
    if key not in row:
        report(key, f"missing; the row has {_names(row)}", "a list of messages")
        return None
    value = _json_cell(row[key])
    if not isinstance(value, list):
        report(key, described(value), "a list of messages")
        return None
    if not value:
        report(key, "the list is empty", "at least a user's and an assistant's message")
        return None
    return value


def _tools(row: Mapping[str, Any], report: Reporter) -> list[dict[str, Any]] | None:
    value = _json_cell(row.get("tools"))
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


def _message(item: Any, path: str, report: Reporter) -> Message | None:
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
    arguments = _json_cell(function.get("arguments"))
    if arguments is not None and not isinstance(arguments, dict):
        report(f"{path}.function.arguments", f"{shown(arguments)}", "a JSON object")
        return call
    # Templates print arguments as JSON themselves: text would come out quoted twice.
    function = {key: value for key, value in function.items() if value is not None} | {"arguments": arguments or {}}
    return call | {"function": function} if "function" in call else function


def _turns(
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


def _read_messages(row: Mapping[str, Any], report: Reporter) -> Example | None:
    items, tools = _list(row, "messages", report), _tools(row, report)
    if items is None:
        return None
    messages = [_any_message(item, f"messages[{index}]", report) for index, item in enumerate(items)]
    _turns(messages, "messages", report)
    return Chat([message for message in messages if message is not None], tools)


def _read_sharegpt(row: Mapping[str, Any], report: Reporter) -> Example | None:
    items, tools = _list(row, "conversations", report), _tools(row, report)
    if items is None:
        return None
    messages = [_any_message(item, f"conversations[{index}]", report) for index, item in enumerate(items)]
    if row.get("system") and (messages[0] is None or messages[0]["role"] != "system"):
        system = report.text(row, "system")
        _turns(messages, "conversations", report, state="system")
        messages = [{"role": "system", "content": system}, *messages]
    else:
        _turns(messages, "conversations", report)
    return Chat([message for message in messages if message is not None], tools)


def _any_message(item: Any, path: str, report: Reporter) -> Message | None:
    """A message in OpenAI's (role, content) or ShareGPT's (from, value) spelling, whatever the column is called."""
    if not isinstance(item, dict):
        report(path, described(item), 'an object with "role" and "content"')
        return None
    if "from" not in item:
        return _message(item, path, report)
    if item.get("from") == "function_call":
        call = _json_cell(item.get("value"))
        checked = _tool_call(call, f"{path}.value", report)
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": checked}]}
    role = _role(item, "from", path, SHAREGPT_ROLES, report)
    value = report.text(item, "value", f"{path}.value", empty=role in ("system", "tool"))
    message = {} if item.get("weight") is None else {"weight": item["weight"]}
    return None if role is None or value is None else message | {"role": role, "content": value}


# --- the other formats -----------------------------------------------------------------------------


def _read_prompt_completion(row: Mapping[str, Any], report: Reporter) -> Example | None:
    prompt, completion = _json_list(row.get("prompt")), _json_list(row.get("completion"))
    if isinstance(prompt, list) or isinstance(completion, list):
        return _read_message_lists(dict(row) | {"prompt": prompt, "completion": completion}, report)
    first, second = report.text(row, "prompt"), report.text(row, "completion")
    return None if first is None or second is None else Pair(first, second)


def _json_list(value: Any) -> Any:
    """A list of messages written as JSON text; other text that happens to look like JSON stays text."""
    read = _json_cell(value)
    is_messages = isinstance(read, list) and read and all(isinstance(item, dict) and "role" in item for item in read)
    return read if is_messages or isinstance(value, list) else value


def _read_message_lists(row: Mapping[str, Any], report: Reporter) -> Example | None:
    lists: dict[str, list[Message | None]] = {}
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(key)
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        items = _list({key: value} if key in row else {}, key, report)
        if items is None:
            return None
        lists[key] = [_message(item, f"{key}[{index}]", report) for index, item in enumerate(items)]
    state = _turns(lists["prompt"], "prompt", report, last=False)
    if not report.faults:
        _turns(lists["completion"], "completion", report, state=state)
    messages = [message for message in lists["prompt"] + lists["completion"] if message is not None]
    return Chat(messages, _tools(row, report), trained_from=len(lists["prompt"]))


def _read_alpaca(row: Mapping[str, Any], report: Reporter) -> Example | None:
    instruction, output = report.text(row, "instruction"), report.text(row, "output")
    extra = dict.fromkeys(("input", "system"), "")
    for key in extra:
        if row.get(key) is not None:
            extra[key] = report.text(row, key, empty=True) or ""
    if instruction is None or output is None:
        return None
    return Instruction(instruction, extra["input"], output, extra["system"])


def _read_text(row: Mapping[str, Any], report: Reporter) -> Example | None:
    text = report.text(row, "text")
    return None if text is None else Text(text)


@dataclass(frozen=True)
class Format:
    """One shape of rows.

    Attributes:
        name: as `dataset.format` spells it.
        required: columns that tell it.
        optional: columns it reads too.
            read: the checking reader; None for a format that is only recognised.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Reporter], Example | None] | None


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("messages", ("messages",), ("tools",), _read_messages),
        Format("sharegpt", ("conversations",), ("system", "tools"), _read_sharegpt),
        Format("prompt_completion", ("prompt", "completion"), ("tools",), _read_prompt_completion),
        Format("alpaca", ("instruction", "output"), ("input", "system"), _read_alpaca),
        Format("text", ("text",), (), _read_text),
        Format("preference", ("chosen", "rejected"), ("prompt",), None),
        Format("prompt", ("prompt",), (), None),
    )
}

METHOD_FORMATS: dict[str, tuple[str, ...]] = {
    "sft": ("messages", "sharegpt", "prompt_completion", "alpaca", "text"),
}
"""Formats that each method can be prepared from; a method that is not here cannot be prepared yet."""

COLUMNS = tuple(dict.fromkeys(name for item in FORMATS.values() for name in (*item.required, *item.optional)))


def formats_of(method: str) -> tuple[str, ...]:
    """The formats a method takes.

    Raises:
        UsageError: rows cannot be prepared for this method.
    """
    if method not in METHOD_FORMATS:
        raise UsageError(
            f"this release cannot prepare rows for the method {method}",
            where="method",
            todo=f"methods with data preparation: {', '.join(METHOD_FORMATS)}",
        )
    return METHOD_FORMATS[method]


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse a `dataset.columns` that maps a name no format has.

    Raises:
        UsageError: with the nearest name.
    """
    for name in columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            raise UsageError(
                f"no format has a column {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                where="dataset.columns",
                todo=f"write {{format's name: source's name}}; names of formats: {', '.join(COLUMNS)}",
            )


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """`row` with the source's names replaced by the format's."""
    if not columns:
        return dict(row)
    sources = set(columns.values())
    kept = {key: value for key, value in row.items() if key not in sources and key not in columns}
    return kept | {name: row[source] for name, source in columns.items() if source in row}


def detect(rows: Iterable[Any], method: str, asked: str, columns: Mapping[str, str]) -> tuple[Format, str]:
    """The format of a data set and the reason, from its first rows.

    Args:
        rows: the first rows, as they were read.
        method: the training method.
        asked: `dataset.format`; `auto` to detect.
        columns: `dataset.columns`.

    Raises:
        UsageError: the method does not take the format, or several fit.
        DataError: none fits.
    """
    usable = formats_of(method)
    check_columns(columns)
    seen_rows = [rename(row, columns) for row in rows if isinstance(row, dict)]
    names: dict[str, Any] = {}
    for row in seen_rows:
        for key, value in row.items():
            if names.get(key) is None:
                names[key] = value
    if asked != "auto":
        return _asked(asked, usable, method), f"dataset.format is {asked}"
    found = [item for item in FORMATS.values() if all(column in names for column in item.required)]
    fitting = [item for item in found if item.name in usable]
    mapped = [item for item in fitting if columns and set(columns) <= {*item.required, *item.optional}]
    fitting = mapped or fitting
    structured = [item for item in fitting if item.name != "text"]
    if len(fitting) == 2 and len(structured) == 1 and _text_repeats(structured[0], seen_rows):
        columns_seen = ", ".join(structured[0].required)
        return structured[0], f"the rows have {columns_seen}, and their column text repeats these"
    if len(fitting) > 1:
        raise _ambiguous(fitting, names)
    if not fitting:
        raise _none_fits(found, usable, method, names)
    chosen = fitting[0]
    seen = ", ".join(chosen.required)
    if chosen.name in ("messages", "sharegpt"):
        return chosen, f"the rows have a column {seen}"
    return chosen, f"the rows have the columns {seen}" if "," in seen else f"the rows have the column {seen}"


def _text_repeats(item: Format, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the column `text` is a rendering of the format's own columns, as in the Alpaca data set."""
    complete = [row for row in rows if isinstance(row.get("text"), str)]
    return bool(complete) and all(
        text.strip() in row["text"]
        for row in complete
        for column in item.required
        for text in _strings(row.get(column))
    )


def _strings(value: Any) -> list[str]:
    """The texts in a field: itself, or what its messages say."""
    if isinstance(value, str):
        return [value]
    messages = [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []
    said = [message.get(key) for message in messages for key in ("content", "value")]
    return [text for text in said if isinstance(text, str)]


def _asked(asked: str, usable: Sequence[str], method: str) -> Format:
    if asked not in usable:
        raise UsageError(
            f"the method {method} does not take rows of the format {asked}",
            where="dataset.format",
            todo=f"it takes: {', '.join(usable)}",
        )
    return FORMATS[asked]


def _ambiguous(fitting: Sequence[Format], names: Iterable[str]) -> UsageError:
    candidates = "; ".join(f"{item.name} ({', '.join(item.required)})" for item in fitting)
    return UsageError(
        f"the rows fit several formats: {candidates}. Their columns: {', '.join(names)}",
        where="dataset.format",
        todo=f"choose one: dataset.format={fitting[0].name}",
    )


def _none_fits(found: Sequence[Format], usable: Sequence[str], method: str, names: Mapping[str, Any]) -> DataError:
    if not names:
        return DataError(
            "the rows are not objects with named columns", where="dataset.format", todo="write one object per row"
        )
    seen = ", ".join(names)
    if found:
        return DataError(
            f"the rows look like {found[0].name} ({', '.join(found[0].required)}), which {method} does not take",
            where="dataset.format",
            todo=f"{method} takes: {_wanted(usable)}",
        )
    return DataError(
        f"the columns fit no format: {seen}",
        where="dataset.format",
        todo=f"{method} takes: {_wanted(usable)}. Map other names with dataset.columns, "
        "such as dataset.columns={prompt: question, completion: answer}",
    )


def _wanted(usable: Sequence[str]) -> str:
    return "; ".join(f"{name} ({', '.join(FORMATS[name].required)})" for name in usable)
