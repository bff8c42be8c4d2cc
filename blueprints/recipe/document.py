"""Recipe text with places: YAML 1.2 core, every key and value knowing the line it stands on.

PyYAML reads the syntax; the meaning of scalars is decided here, because PyYAML's own rules are YAML 1.1 (`no` is false,
`2e-4` is a string). What cannot be meant in a recipe is a fault with a place: duplicate keys, tags, merge keys, several
documents, anchors that grow without bound.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import math
import os
import re
import select
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import yaml

from blueprints.errors import Fault

MAX_BYTES = 1 << 20
"""Largest recipe file in bytes."""
MAX_NODES = 20_000
"""Most keys and values in one file, anchors expanded."""
MAX_DEPTH = 32
"""Deepest nesting of maps and lists."""


@dataclass(frozen=True)
class Origin:
    """Which layer a value comes from, and where in it.

    Attributes:
        layer: default, derived, recipe, overlay, override, environment or python.
        where: the place, such as `sft-lora.yaml:12` or `override 'lora.r=4'`; empty for a default.
    """

    layer: str
    where: str = ""

    def __str__(self) -> str:
        if not self.where or self.where.startswith(self.layer):
            return self.where or self.layer
        # What is said of a default or a derived value is a remark, not a place.
        return f"{self.layer}, {self.where}" if self.layer in ("default", "derived") else f"{self.layer} {self.where}"


Content: TypeAlias = "bool | int | float | str | list[Node] | dict[str, Node] | None"
KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value stands in a tree: keys of maps and indices of lists."""


@dataclass(frozen=True)
class Node:
    """A value and its place; maps and lists hold nodes again.

    Attributes:
        content: the value.
        origin: its layer and place.
        size: number of values in it, itself included.
        text: a plain scalar as it was written, such as `1e5`; empty for anything else.
    """

    content: Content
    origin: Origin
    size: int = 1
    text: str = ""

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content

    def at(self, path: KeyPath) -> Node | None:
        """The node at `path`, None if there is none."""
        node: Node | None = self
        for step in path:
            content = node.content if node is not None else None
            if isinstance(content, dict):
                node = content.get(str(step))
            elif isinstance(content, list) and isinstance(step, int) and 0 <= step < len(content):
                node = content[step]
            else:
                return None
        return node


class DocumentError(Exception):
    """A text that cannot be read on from some place."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


def scalar(text: str) -> bool | int | float | str | None:
    """What a plain scalar means by the YAML 1.2 core schema.

    Raises:
        ValueError: a number too long to be read.
    """
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.fullmatch(text):
            return int(text.replace("0o", "").replace("0x", "") if base != 10 else text, base)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if _NAN.fullmatch(text) else text


def read_file(path: Path, layer: str, shown: str) -> tuple[Node | None, list[Fault]]:
    """The mapping in a YAML file and the faults of its text; None where nothing could be read.

    Args:
        path: the file.
        layer: layer of the origins, `recipe` or `overlay`.
        shown: the file's name in messages.
    """
    try:
        return read_text(_load(path, shown), layer, shown)
    except DocumentError as error:
        return None, [error.fault]


def _load(path: Path, shown: str) -> str:
    if path.is_dir():
        raise DocumentError(Fault(shown, "", "this is a directory", "a recipe file", _files_in(path)))
    try:
        raw = _raw(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DocumentError(Fault(shown, "", f"cannot be read: {reason}", "a readable file")) from None
    if len(raw) > MAX_BYTES:
        raise DocumentError(Fault(shown, "", f"larger than {MAX_BYTES} bytes", "a recipe, which is a short text"))
    return _decode(raw, shown)


PIPE_SECONDS = 5.0
"""Longest wait for the next bytes of a pipe."""


def _raw(path: Path) -> bytes:
    """The file's bytes, at most one more than `MAX_BYTES`.

    Raises:
        OSError: it cannot be read; `TimeoutError`: it is a pipe that nobody writes to.
    """
    # Opened plainly, a named pipe without a writer would block for ever. Pipes are read: a shell's `<(...)` is one.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.set_blocking(descriptor, True)
            with io.BufferedReader(file) as buffered:
                return buffered.read(MAX_BYTES + 1)
        raw = b""
        while len(raw) <= MAX_BYTES:
            if not select.select([descriptor], [], [], PIPE_SECONDS)[0]:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing came through the pipe in {PIPE_SECONDS:.0f} seconds")
            chunk = file.read(MAX_BYTES + 1 - len(raw))
            if not chunk:
                break
            raw += chunk
        return raw


def _files_in(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml"))[:5]
    except OSError:
        names = []
    return f"Recipes in it: {', '.join(names)}." if names else ""


BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
"""In this order: UTF-32's mark begins with UTF-16's."""


def _decode(raw: bytes, shown: str) -> str:
    for mark, encoding in BYTE_ORDER_MARKS:
        if raw.startswith(mark):
            raise DocumentError(Fault(f"{shown}:1", "", f"the file is {encoding}", "UTF-8", "Save it as UTF-8."))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        line = raw.count(b"\n", 0, start) + 1
        problem = f"byte 0x{raw[start]:02x} at offset {start} is not UTF-8"
        raise DocumentError(Fault(f"{shown}:{line}", "", problem, "UTF-8 text", "Save it as UTF-8.")) from None


def read_text(text: str, layer: str, shown: str) -> tuple[Node | None, list[Fault]]:
    """The mapping in a YAML text and the faults of the text; None where nothing could be read."""
    builder = _Builder(layer, lambda line: f"{shown}:{line}")
    try:
        node = builder.document(text)
    except DocumentError as error:
        return None, [*builder.faults, error.fault]
    if node is None:
        problem = "nothing but comments" if text.strip() else "the file is empty"
        return None, [Fault(f"{shown}:1", "", problem, "a recipe with `method`, `model` and `dataset`")]
    if not isinstance(node.content, dict):
        problem = f"found {describe_value(node.plain())}"
        return None, [Fault(node.origin.where, "", problem, "a map with keys such as `method`, `model` and `dataset`")]
    return node, builder.faults


def read_value(text: str, origin: Origin) -> tuple[Node, list[Fault]]:
    """The value of a `key=value` argument: JSON, a YAML flow collection, or a plain scalar.

    Anything that does not start with a bracket or a quote is one scalar to its end, so `a: b` and `x #1` are strings.

    Raises:
        DocumentError: brackets or quotes that do not close.
    """
    text = text.strip()
    builder = _Builder(origin.layer, lambda _line: origin.where)
    if not text.startswith(("{", "[", '"', "'")):
        return builder.leaf(text, origin.where), builder.faults
    try:
        node = read_json(text, origin)
        return node, list(unusable(node, ()))
    except _DuplicateKey as error:
        raise DocumentError(Fault(origin.where, "", f"{error}", "each key once")) from None
    except (ValueError, RecursionError):
        pass  # not JSON: YAML decides, and words the fault
    try:
        value = builder.document(text)
    except DocumentError as error:
        hint = "Quote a text that begins with a bracket or a quote: key='\"...\"'."
        raise DocumentError(replace(error.fault, hint=hint)) from None
    return value if value is not None else Node(None, origin), builder.faults


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKey(f"duplicate key `{key}`")
        result[key] = value
    return result


def read_json(text: str, origin: Origin) -> Node:
    """A JSON text as a node, all of it from `origin`.

    Raises:
        ValueError: not JSON, or a key twice in one object.
        RecursionError: nested beyond all sense.
    """
    return from_plain(json.loads(text, object_pairs_hook=_unique), origin)


def from_plain(value: Any, origin: Origin) -> Node:
    """Plain Python data as a node, all of it from `origin`; what is no recipe data stays for the schema to refuse."""
    if isinstance(value, Mapping):
        entries = {str(key): from_plain(item, origin) for key, item in value.items()}
        return Node(entries, origin, 1 + sum(entry.size for entry in entries.values()))
    if isinstance(value, list | tuple):
        items = [from_plain(item, origin) for item in value]
        return Node(items, origin, 1 + sum(item.size for item in items))
    return Node(value, origin)


def unusable(node: Node, path: KeyPath) -> Iterator[Fault]:
    """A fault for every scalar below `node` that no key can take: nan, infinity, huge integers, text that is none."""
    if isinstance(node.content, dict):
        for key, item in node.content.items():
            yield from unusable(item, (*path, key))
    elif isinstance(node.content, list):
        for index, item in enumerate(node.content):
            yield from unusable(item, (*path, index))
    else:
        problem = _no_value(node.content)
        if problem:
            yield Fault(node.origin.where, dotted(path), *problem)


def _no_value(content: object) -> tuple[str, str] | None:
    if isinstance(content, float) and not math.isfinite(content):
        return f"found {describe_value(content)}", "a finite number"
    if isinstance(content, int) and content.bit_length() > 63:
        return f"found {describe_value(content)}", "a number of sensible size"
    if isinstance(content, str):
        bad = next((character for character in content if character == "\0" or "\ud800" <= character <= "\udfff"), None)
        if bad is not None:
            return f"found a text with U+{ord(bad):04X}, which is no character", "text"
    return None


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0, "c")` as `a.b[0].c`."""
    text = ""
    for step in path:
        # A key may be any text; a message is one line.
        name = f"[{step}]" if isinstance(step, int) else step if step.isprintable() else repr(step)[1:-1]
        text += f".{name}" if text and isinstance(step, str) else name
    return text


def describe_value(value: Any) -> str:
    """A value as found, with its type in plain words, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int):
        return f"the integer {_short(str(value) if value.bit_length() < 2000 else hex(value))}"
    if isinstance(value, float):
        return f"the number {value!r}" if math.isfinite(value) else f"{value!r}, which is not a finite number"
    if isinstance(value, str):
        return f"the string {_short(json.dumps(value, ensure_ascii=False))}"
    if isinstance(value, list):
        return f"a list of {len(value)} item{'' if len(value) == 1 else 's'}"
    if isinstance(value, dict):
        names = _short(", ".join(str(key) for key in value))
        return f"a map with the key{'' if len(value) == 1 else 's'} {names}" if value else "an empty map"
    return f"the Python object {_short(repr(value))} of type {type(value).__name__}"


def _short(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= 80 else text[:76] + " ..."


class _Builder:
    """Turns PyYAML's events into nodes, bounded in depth and size."""

    def __init__(self, layer: str, where: Callable[[int], str]) -> None:
        self.layer, self.where = layer, where
        self.faults: list[Fault] = []
        self.anchors: dict[str, Node | None] = {}  # None while the anchored value is still open
        self.events: Iterator[yaml.Event] = iter(())
        self.ahead: yaml.Event | None = None
        self.line = 1
        self.count = 0
        self.depth = 0
        self.path: list[str | int] = []

    def document(self, text: str) -> Node | None:
        """The one document of `text`; None if there is none."""
        try:
            return self._document(yaml.parse(text, Loader=yaml.SafeLoader))
        except yaml.reader.ReaderError as error:
            character = error.character if isinstance(error.character, int) else ord(str(error.character)[0])
            line = text.count("\n", 0, error.position) + 1
            problem = f"control character U+{character:04X}"
            self._stop(line, problem, "printable text", "Remove it, or write it as an escape in double quotes.")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            if "end of stream" in (error.problem or "") and error.context_mark:
                mark = error.context_mark  # what does not end is better shown where it begins
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            self._stop(line, *_syntax(error, text, line, column))
        except (ValueError, OverflowError) as error:  # PyYAML on escapes such as \\U99999999
            self._stop(self.line, f"not YAML, on this line or soon after: {error}", "")

    def _document(self, events: Iterator[yaml.Event]) -> Node | None:
        self.events = events
        self._take()  # the start of the stream
        if self._at(yaml.StreamEndEvent):
            return None
        self._take()  # the start of the document
        node = self._node()
        self._take()  # the end of the document
        if not self._at(yaml.StreamEndEvent):
            self._stop(
                _line(self._peek()), "a second YAML document", "one recipe in a file", "Put it into a file of its own."
            )
        return node

    def _peek(self) -> yaml.Event:
        if self.ahead is None:
            self.ahead = next(self.events)
        return self.ahead

    def _take(self) -> yaml.Event:
        event = self._peek()
        self.ahead, self.line = None, _line(event)
        return event

    def _at(self, kind: type[yaml.Event]) -> bool:
        return isinstance(self._peek(), kind)

    def _node(self) -> Node:
        event = self._take()
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor, line)
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            raise TypeError(f"no value begins with {event}")  # the parser's grammar has no such place
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if event.tag is not None and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            hint = "Leave the tag out; put a text that looks like a number into quotes."
            self.faults.append(Fault(self.where(line), dotted(tuple(self.path)), f"the tag `{tag}`", "no tag", hint))
        node = self._scalar(event, line) if isinstance(event, yaml.ScalarEvent) else self._collection(event, line)
        self._grow(1, line)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _collection(self, event: yaml.Event, line: int) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._stop(line, f"nested deeper than {MAX_DEPTH} levels", "a recipe, which has three or four")
        node = self._map(line) if isinstance(event, yaml.MappingStartEvent) else self._list(line)
        self.depth -= 1
        return node

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Node:
        if event.style is None and event.tag is None:
            return self.leaf(event.value, self.where(line))
        return self._usable(Node(event.value, Origin(self.layer, self.where(line))))

    def _usable(self, node: Node) -> Node:
        """The node; null, and a fault, if no key can take its value."""
        faults = list(unusable(node, tuple(self.path)))
        self.faults += faults
        return Node(None, node.origin) if faults else node

    def leaf(self, text: str, where: str) -> Node:
        """A plain scalar as a node; a number no recipe can mean is a fault."""
        origin = Origin(self.layer, where)
        try:
            return self._usable(Node(scalar(text), origin, text=text))
        except ValueError:  # beyond what Python reads
            problem = f"found a number of {len(text)} digits"
            self.faults.append(Fault(where, dotted(tuple(self.path)), problem, "a number of sensible size"))
            return Node(None, origin)

    def _map(self, line: int) -> Node:
        entries: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while not self._at(yaml.MappingEndEvent):
            key_line = _line(self._peek())
            key = self._key(key_line)
            self.path.append("?" if key is None else key)
            node = self._node()
            self.path.pop()
            if key is None:
                continue
            if key in lines:
                path = dotted((*self.path, key))
                problem = f"duplicate key, first set on line {lines[key]}"
                self.faults.append(Fault(self.where(key_line), path, problem, "each key once", "Remove one of them."))
            else:
                lines[key] = key_line
                entries[key] = replace(node, origin=Origin(self.layer, self.where(key_line)))
        self._take()
        size = 1 + sum(node.size for node in entries.values())
        return Node(entries, Origin(self.layer, self.where(line)), size)

    def _key(self, line: int) -> str | None:
        """The next key of a map; None, and a fault, where it is no string."""
        event = self._peek()
        bare = event.value if isinstance(event, yaml.ScalarEvent) and event.style is None else ""
        if bare == "<<":
            hint = "Write the keys out, or put the shared part into a file and add it with -f."
            self._fault(line, "the merge key `<<`", "keys written out (YAML 1.2 has no merge keys)", hint)
            self._take()
            return None
        value = self._node().content
        if isinstance(value, str):
            return value
        text = describe_value(Node(value, Origin("")).plain())
        hint = f'Put it into quotes: "{_short(bare)}".' if bare else ""
        self._fault(line, f"found {text} as a key", "a string", hint)
        return None

    def _list(self, line: int) -> Node:
        items: list[Node] = []
        while not self._at(yaml.SequenceEndEvent):
            self.path.append(len(items))
            items.append(self._node())
            self.path.pop()
        self._take()
        return Node(items, Origin(self.layer, self.where(line)), 1 + sum(item.size for item in items))

    def _alias(self, name: str | None, line: int) -> Node:
        if name is None or name not in self.anchors:
            self._stop(line, f"the alias `*{name}` has no anchor `&{name}` before it", "an anchor above it")
        node = self.anchors[name]
        if node is None:
            self._stop(line, f"the alias `*{name}` stands inside its own anchor", "a value that ends")
        self._grow(node.size, line)
        return replace(node, origin=Origin(self.layer, self.where(line)))

    def _grow(self, nodes: int, line: int) -> None:
        self.count += nodes
        if self.count > MAX_NODES:
            self._stop(line, f"more than {MAX_NODES} values, anchors expanded", "a recipe, which has some dozens")

    def _fault(self, line: int, problem: str, expected: str, hint: str = "") -> None:
        self.faults.append(Fault(self.where(line), dotted(tuple(self.path)), problem, expected, hint))

    def _stop(self, line: int, problem: str, expected: str, hint: str = "") -> NoReturn:
        raise DocumentError(Fault(self.where(line), dotted(tuple(self.path)), problem, expected, hint))


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _syntax(error: yaml.MarkedYAMLError, text: str, line: int, column: int) -> tuple[str, str, str]:
    """Problem, expectation and hint of a syntax fault, in words that do not need PyYAML's inside."""
    lines = text.split("\n")
    source = lines[line - 1] if line <= len(lines) else ""
    if "\t" in (error.problem or "") or "'\\t'" in (error.problem or ""):
        return f"a tab at column {column}", "spaces: YAML takes no tabs here", "Replace the tab with spaces."
    start = error.context_mark.line + 1 if error.context_mark is not None else line
    context = f"{error.context}{f' that begins on line {start}' if start != line else ''}, " if error.context else ""
    problem = f"not YAML at column {column}: {context}{error.problem}"
    return problem, "", f"The line reads: {_short(source.strip())}" if source.strip() else ""
