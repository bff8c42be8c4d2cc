"""Shapes of rows: recognised, checked field by field, and brought into the few forms that training knows.

Each format has one reader: it takes a raw row, reports every fault it finds with the path of the field, and returns one
of the forms in `initializers.messages`. Which formats a method takes is a table of `blueprints.recipe.rows`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blueprints.errors import DataError, UsageError
from blueprints.recipe.rows import Kind, formats_of
from initializers.messages import (
    Chat,
    Example,
    Instruction,
    Message,
    Pair,
    Reporter,
    Text,
    any_message,
    check_turns,
    message_cell,
    message_list,
    message_of,
    tools_of,
)
from initializers.preferences import RANKED, RANKS, read_preference
from initializers.prompts import prompt_reader, read_prompt


def _read_messages(row: Mapping[str, Any], report: Reporter) -> Example | None:
    items, tools = message_list(row, "messages", report), tools_of(row, report)
    if items is None:
        return None
    messages = [any_message(item, f"messages[{index}]", report) for index, item in enumerate(items)]
    check_turns(messages, "messages", report)
    return Chat([message for message in messages if message is not None], tools)


def _read_sharegpt(row: Mapping[str, Any], report: Reporter) -> Example | None:
    items, tools = message_list(row, "conversations", report), tools_of(row, report)
    if items is None:
        return None
    messages = [any_message(item, f"conversations[{index}]", report) for index, item in enumerate(items)]
    if row.get("system") and (messages[0] is None or messages[0]["role"] != "system"):
        system = report.text(row, "system")
        check_turns(messages, "conversations", report, state="system")
        messages = [{"role": "system", "content": system}, *messages]
    else:
        check_turns(messages, "conversations", report)
    return Chat([message for message in messages if message is not None], tools)


# --- the other formats -----------------------------------------------------------------------------


def _read_prompt_completion(row: Mapping[str, Any], report: Reporter) -> Example | None:
    prompt, completion = message_cell(row.get("prompt")), message_cell(row.get("completion"))
    if isinstance(prompt, list) or isinstance(completion, list):
        return _read_message_lists(dict(row) | {"prompt": prompt, "completion": completion}, report)
    first, second = report.text(row, "prompt"), report.text(row, "completion")
    return None if first is None or second is None else Pair(first, second)


def _read_message_lists(row: Mapping[str, Any], report: Reporter) -> Example | None:
    lists: dict[str, list[Message | None]] = {}
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(key)
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        items = message_list({key: value} if key in row else {}, key, report)
        if items is None:
            return None
        lists[key] = [message_of(item, f"{key}[{index}]", report) for index, item in enumerate(items)]
    state = check_turns(lists["prompt"], "prompt", report, last=False)
    if not report.faults:
        check_turns(lists["completion"], "completion", report, state=state)
    messages = [message for message in lists["prompt"] + lists["completion"] if message is not None]
    return Chat(messages, tools_of(row, report), trained_from=len(lists["prompt"]))


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


Read = Callable[[Mapping[str, Any], Reporter], Example | None]


@dataclass(frozen=True)
class Format:
    """One shape of rows.

    Attributes:
        name: as `dataset.format` spells it.
        required: columns that tell it.
        optional: columns it reads too.
        read: the checking reader.
        others: other sets of columns that tell it.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Read
    others: tuple[tuple[str, ...], ...] = ()

    def seen(self, names: Iterable[str]) -> tuple[str, ...]:
        """The first set of columns that tells this format and is among `names`; empty if none is."""
        there = set(names)
        return next((columns for columns in (self.required, *self.others) if there.issuperset(columns)), ())

    def reader(self, kind: Kind) -> Read:
        """The reader for what rows are to become."""
        return prompt_reader(self.name, self.read) if kind == "prompt" and self.name != "prompt" else self.read


_RANKED = tuple(("prompt", answers, order) for answers in RANKED for order in RANKS)
FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("messages", ("messages",), ("tools",), _read_messages),
        Format("sharegpt", ("conversations",), ("system", "tools"), _read_sharegpt),
        Format("prompt_completion", ("prompt", "completion"), ("tools",), _read_prompt_completion),
        Format("alpaca", ("instruction", "output"), ("input", "system"), _read_alpaca),
        Format("text", ("text",), (), _read_text),
        Format("preference", ("chosen", "rejected"), ("prompt", "system", "tools"), read_preference, _RANKED),
        Format("prompt", ("prompt",), ("system", "tools", "answer", "solution"), read_prompt),
    )
}

COLUMNS = tuple(
    dict.fromkeys(
        name for item in FORMATS.values() for name in (*item.required, *item.optional, *sum(item.others, start=()))
    )
)


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
    found = [item for item in FORMATS.values() if item.seen(names)]
    fitting = [item for item in found if item.name in usable]
    mapped = [item for item in fitting if columns and set(columns) <= {*item.seen(names), *item.optional}]
    fitting = _most_specific(mapped or fitting, names)
    structured = [item for item in fitting if item.name != "text"]
    if len(fitting) == 2 and len(structured) == 1 and _text_repeats(structured[0], seen_rows):
        columns_seen = ", ".join(structured[0].required)
        return structured[0], f"the rows have {columns_seen}, and their column text repeats these"
    if len(fitting) > 1:
        raise _ambiguous(fitting, names)
    if not fitting:
        raise _none_fits(found, usable, method, names)
    return fitting[0], _reason(fitting[0], names)


def _most_specific(fitting: list[Format], names: Iterable[str]) -> list[Format]:
    """Without the formats of which another one reads every column and more: prompt beside prompt and completion."""
    there = set(names)
    read = {item.name: {*item.seen(there), *(there & set(item.optional))} for item in fitting}
    return [
        item
        for item in fitting
        if not any(
            set(item.seen(there)) < read[other.name] and not set(other.seen(there)) <= set(item.seen(there))
            for other in fitting
            if other is not item
        )
    ]


def _reason(chosen: Format, names: Iterable[str]) -> str:
    """What was seen that tells the format."""
    columns = chosen.seen(names)
    if chosen.name == "preference":
        if "chosen" in columns and "prompt" in names:
            return "the rows have the columns prompt, chosen, rejected"
        if "chosen" in columns:
            return "the rows have the columns chosen, rejected; the prompt is what both begin with"
        return f"the rows have the columns {', '.join(columns)}: the best answer is paired with the worst"
    if len(columns) > 1:
        return f"the rows have the columns {', '.join(columns)}"
    kind = "a column" if chosen.name in ("messages", "sharegpt") else "the column"
    return f"the rows have {kind} {columns[0]}"


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
        todo=f"{method} takes: {_wanted(usable)}. Map other names with dataset.columns, such as "
        f"dataset.columns={_mapping(usable, names)}",
    )


def _mapping(usable: Sequence[str], names: Mapping[str, Any]) -> str:
    """An example of `dataset.columns` for these rows."""
    asked = next(
        (name for name in ("question", "problem", "query", "instruction", "input") if name in names), "question"
    )
    if usable == ("preference",):
        return f"{{prompt: {asked}, chosen: better, rejected: worse}}"
    return f"{{prompt: {asked}}}" if usable[0] == "prompt" else f"{{prompt: {asked}, completion: answer}}"


def _wanted(usable: Sequence[str]) -> str:
    return "; ".join(f"{name} ({', '.join(FORMATS[name].required)})" for name in usable)
