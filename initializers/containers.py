"""Rows out of files, in constant memory: JSON Lines, JSON, CSV, Parquet and Arrow, plain or compressed.

A container is recognised by its content first and by its name second: a `.json` file that is JSON Lines, or a `.jsonl`
that is gzipped, is read as what it is. Every reader yields `Row`s with their place, or `Fault`s where a row cannot be
read at all; nothing here knows what a row should look like.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from blueprints.errors import DataError, Fault

LINE_LIMIT = 64 << 20
"""Bytes of the longest row a text file may have: the bound on memory."""
_BATCH = 256
_CHUNK = 1 << 20

COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
CONTAINERS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
NOT_ROWS = frozenset(
    {
        "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "_manifest.json",
        "croissant.json", "package.json", "config.json", "metadata.json", "readme.json",
    }
)  # fmt: skip
"""Names of files that describe a data set and hold no rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read.

    Attributes:
        where: `file:line` for text, `file row N` for columns (both count from 1).
        value: the parsed row; a mapping in every well-formed data set.
    """

    where: str
    value: Any


@dataclass(frozen=True)
class Container:
    """How one file is read: `jsonl`, `json`, `csv`, `tsv`, `parquet` or `arrow`, under at most one compression."""

    kind: str
    compression: str | None

    def __str__(self) -> str:
        return self.kind + (f" ({self.compression})" if self.compression else "")


def is_data_name(relative: str) -> bool:
    """Whether a file found in a directory counts as rows, by its name alone."""
    name = relative.rsplit("/", 1)[-1].lower()
    if name in NOT_ROWS or name.startswith(("cache-", "_")) or name.endswith(".index.json"):
        return False
    return _by_name(name)[0] is not None


def recognise(path: Path, relative: str) -> Container:
    """The container of a file, from its first bytes and its name.

    Raises:
        DataError: neither the content nor the name says what it is.
    """
    kind, _ = _by_name(relative.lower())
    with path.open("rb") as file:
        compression = _compression(file.read(8))
    with ExitStack() as stack, _Unreadable(relative):
        head = _open(stack, path, compression).read(4096)
    return Container(_sniff(head, kind, relative, path, compression), compression)


def read_rows(path: Path, relative: str, container: Container | None = None) -> Iterator[Row | Fault]:
    """The rows of one file, in its order.

    Args:
        path: the file.
        relative: its name in messages.
        container: what it is. Default: recognised.

    Raises:
        DataError: the file as a whole cannot be read (truncated archive, broken Parquet).
    """
    container = container or recognise(path, relative)
    with ExitStack() as stack, _Unreadable(relative):
        yield from READERS[container.kind](stack, path, relative, container.compression)


def _by_name(name: str) -> tuple[str | None, str | None]:
    compression = None
    for suffix, value in COMPRESSIONS.items():
        if name.endswith(suffix):
            name, compression = name.removesuffix(suffix), value
            break
    return next((kind for suffix, kind in CONTAINERS.items() if name.endswith(suffix)), None), compression


def _compression(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"BZh"):
        return "bz2"
    if head.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    return "zstd" if head.startswith(b"\x28\xb5\x2f\xfd") else None


def _sniff(head: bytes, named: str | None, relative: str, path: Path, compression: str | None) -> str:
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if named in ("parquet", "arrow"):
        what = "empty" if not head else f"not {named.capitalize()}: it starts with {head[:8]!r}"
        raise DataError(f"the file is {what}", where=relative, todo="it may be a failed download: fetch it again")
    if named in ("csv", "tsv"):
        return named
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        return "jsonl" if named == "jsonl" and _line_is_json(path, compression, relative, alone=False) else "json"
    if text.startswith(b"{"):
        if named == "jsonl" or _line_is_json(path, compression, relative):
            return "jsonl"
        return "json"
    if named is not None:
        return named  # empty or broken: the reader says what is wrong, with the line
    raise DataError(
        f"cannot tell what the file is: it starts with {head[:16]!r}",
        where=relative,
        todo="known: .jsonl, .json, .csv, .tsv, .parquet, .arrow, each also .gz, .bz2, .xz, .zst",
    )


def _line_is_json(path: Path, compression: str | None, relative: str, *, alone: bool = True) -> bool:
    """Whether the first line is a whole JSON value that is not a document of the `{"data": [...]}` kind.

    `alone`: it may be the only line.
    """
    with ExitStack() as stack, _Unreadable(relative):
        file = _open(stack, path, compression)
        line = b""
        while not line.strip().removeprefix(codecs.BOM_UTF8):
            line = file.readline(LINE_LIMIT)
            if not line:
                return False
        more = bool(file.read(_CHUNK).strip())
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError:
        return False
    return more or (
        alone and not (isinstance(value, dict) and (isinstance(value.get("data"), list) or _columns(value)))
    )


def _columns(value: dict[str, Any]) -> bool:
    """Whether an object holds columns, as pandas' `to_json` writes them, rather than one row."""
    lists = all(isinstance(item, list) and not any(isinstance(cell, dict) for cell in item) for item in value.values())
    numbered = all(isinstance(item, dict) and all(key.isdigit() for key in item) for item in value.values())
    return bool(value) and (lists or numbered)


class _Unreadable:
    """Translates what decompressors and Arrow raise into one error that names the file."""

    def __init__(self, relative: str) -> None:
        self.relative = relative

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        import pyarrow as pa

        broken = (EOFError, gzip.BadGzipFile, lzma.LZMAError, pa.ArrowException)
        io_error = isinstance(error, OSError) and error.errno is None  # bz2 and Arrow report bad data this way
        if isinstance(error, broken) or io_error:
            raise DataError(
                f"the file cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                where=self.relative,
                todo="it may be truncated or damaged: fetch or write it again",
            ) from None


def _open(stack: ExitStack, path: Path, compression: str | None) -> IO[bytes]:
    if compression == "gzip":
        return stack.enter_context(io.BufferedReader(gzip.open(path), _CHUNK))
    if compression == "bz2":
        return stack.enter_context(bz2.open(path))
    if compression == "xz":
        return stack.enter_context(lzma.open(path))
    if compression == "zstd":
        import pyarrow as pa

        return stack.enter_context(io.BufferedReader(_Raw(pa.input_stream(str(path), compression="zstd")), _CHUNK))
    return stack.enter_context(path.open("rb", buffering=_CHUNK))


class _Raw(io.RawIOBase):
    """An Arrow stream as a raw Python file, so that it can be read by lines."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


# --- JSON ----------------------------------------------------------------------------------------


class _Duplicate(ValueError):
    """A key that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Duplicate(next(key for key in keys if keys.count(key) > 1))
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _json_fault(where: str, error: Exception, text: str) -> Fault:
    if isinstance(error, _Duplicate):
        return Fault(where, str(error), "the key appears twice in one object", "each key once")
    if isinstance(error, RecursionError):
        return Fault(where, "", "nested too deeply", "a flat row")
    if isinstance(error, json.JSONDecodeError):
        near = text[max(0, error.pos - 15) : error.pos + 25]
        return Fault(where, "", f"not JSON: {error.msg} at column {error.colno}, near {near!r}", "one JSON object")
    return Fault(where, "", f"not JSON: {error}", "one JSON object", "write null or leave the value out")


def _parse(text: str, where: str) -> Row | Fault:
    try:
        return Row(where, _DECODER.decode(text))
    except (ValueError, RecursionError) as error:
        return _json_fault(where, error, text)


def _decode(line: bytes, where: str, *, first: bool) -> str | Fault:
    if first and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Fault(where, "", "the file is UTF-16", "UTF-8", "convert it: iconv -f UTF-16 -t UTF-8")
    try:
        return (line.removeprefix(codecs.BOM_UTF8) if first else line).decode()
    except UnicodeDecodeError as error:
        byte = line[error.start : error.start + 1].hex()
        return Fault(where, "", f"not UTF-8: byte 0x{byte} at position {error.start + 1} of the line", "UTF-8 text")


def _lines(file: IO[bytes], relative: str) -> Iterator[tuple[int, str | Fault]]:
    """Numbered lines as text; a line beyond the limit or not UTF-8 is a fault."""
    number = 0
    while line := file.readline(LINE_LIMIT + 1):
        number += 1
        where = f"{relative}:{number}"
        if len(line) > LINE_LIMIT:
            while line and not line.endswith(b"\n"):
                line = file.readline(LINE_LIMIT)
            yield number, Fault(where, "", f"the line is longer than {LINE_LIMIT >> 20} MiB", "one row per line")
            continue
        text = _decode(line, where, first=number == 1)
        yield number, text
        if isinstance(text, Fault) and "UTF-16" in text.problem:
            return


def _read_jsonl(stack: ExitStack, path: Path, relative: str, compression: str | None) -> Iterator[Row | Fault]:
    for number, text in _lines(_open(stack, path, compression), relative):
        if isinstance(text, Fault):
            yield text
        elif text.strip():
            yield _parse(text.rstrip("\r\n"), f"{relative}:{number}")


class _Text:
    """A window over a text file for decoding one JSON value at a time."""

    def __init__(self, file: IO[bytes], relative: str) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8-sig")()
        self.relative, self.buffer, self.position, self.ended = relative, "", 0, False
        self._line, self._counted = 1, 0

    def more(self, size: int = _CHUNK) -> bool:
        """Read on; False at the end of the file."""
        if self.ended:
            return False
        chunk = self._file.read(size)
        self.ended = not chunk
        self._count()
        self.buffer = self.buffer[self.position :] + self._decoder.decode(chunk, final=self.ended)
        self.position = self._counted = 0
        return True

    def _count(self) -> None:
        self._line += self.buffer.count("\n", self._counted, self.position)
        self._counted = self.position

    def peek(self) -> str:
        """The next character that is not white space, empty at the end of the file."""
        while True:
            match = _SPACE.match(self.buffer, self.position)
            assert match is not None  # the pattern matches the empty string
            self.position = match.end()
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self.more():
                return ""

    @property
    def where(self) -> str:
        """The place of the next character."""
        self._count()
        return f"{self.relative}:{self._line}"

    def take(self) -> str:
        """Consume the next character that is not white space."""
        character = self.peek()
        self.position += len(character)
        return character

    def value(self) -> Any:
        """Consume one JSON value.

        Raises:
            ValueError: it is not JSON, or longer than `LINE_LIMIT` characters.
        """
        self.peek()
        size = _CHUNK
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError:
                # Perhaps the value is only cut off by the window: look further before calling it broken.
                if len(self.buffer) - self.position > LINE_LIMIT or not self.more(size):
                    raise
                size *= 2
                continue
            if end < len(self.buffer) or not self.more():
                self.position = end
                return value


_SPACE = re.compile(r"[ \t\r\n]*")
_SHAPES = 'a list of rows, {"data": [rows]}, or one row per line'


def _read_json(stack: ExitStack, path: Path, relative: str, compression: str | None) -> Iterator[Row | Fault]:
    text = _Text(_open(stack, path, compression), relative)
    try:
        if text.peek() == "{" and not _seek_data(text):
            hint = "from pandas: to_json(orient='records', lines=True)"
            yield Fault(text.where, "", "a JSON object without a list `data`", _SHAPES, hint)
            return
        if text.take() != "[":
            yield Fault(text.where, "", "not a list of rows", _SHAPES)
            return
        yield from _items(text)
    except UnicodeDecodeError as error:
        yield Fault(text.where, "", f"not UTF-8: {error.reason}", "UTF-8 text")


def _items(text: _Text) -> Iterator[Row | Fault]:
    if text.peek() == "]":
        return
    line = ""
    for number in itertools.count(1):
        where = text.where if text.peek() else f"{text.relative}: end of file"
        # Several rows on a line (most programs write JSON without line breaks) are told apart by their number.
        line, where = where, f"{where} row {number}" if where == line else where
        try:
            yield Row(where, text.value())
        except (ValueError, RecursionError) as error:
            yield _json_fault(where, error, text.buffer)
            return  # after broken JSON nobody knows where the next row begins
        separator = text.take()
        if separator == "]":
            return
        if separator != ",":
            yield Fault(text.where, "", f"found {separator or 'the end of the file'!r} after a row", "`,` or `]`")
            return


def _seek_data(text: _Text) -> bool:
    """Move to the value of the key `data` of the object that starts here; False if it has none that is a list."""
    text.take()
    while text.peek() == '"':
        try:
            key = text.value()
            if text.take() != ":":
                return False
            if key == "data" and text.peek() == "[":
                return True
            text.value()
        except (ValueError, RecursionError):
            return False
        if text.take() != ",":
            return False
    return False


# --- CSV -----------------------------------------------------------------------------------------


class _Broken(Exception):
    """A line that is not text, on its way through the csv module."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


def _read_csv(stack: ExitStack, path: Path, relative: str, compression: str | None) -> Iterator[Row | Fault]:
    yield from _read_table(_open(stack, path, compression), relative, delimiter=None)


def _read_tsv(stack: ExitStack, path: Path, relative: str, compression: str | None) -> Iterator[Row | Fault]:
    yield from _read_table(_open(stack, path, compression), relative, delimiter="\t")


def _read_table(file: IO[bytes], relative: str, *, delimiter: str | None) -> Iterator[Row | Fault]:
    def texts() -> Iterator[str]:
        for _, text in _lines(file, relative):
            if isinstance(text, Fault):
                raise _Broken(text)
            yield text

    lines = texts()
    csv.field_size_limit(LINE_LIMIT)
    try:
        first = next(lines, "")
        delimiter = delimiter or max(",;\t|", key=first.count)
        reader = csv.reader(_chain(first, lines), delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            yield Fault(f"{relative}:1", twice, "the column appears twice in the header", "each name once")
            return
        yield from _records(reader, header, relative)
    except _Broken as broken:
        yield broken.fault
    except csv.Error as error:
        yield Fault(f"{relative}:1", "", f"not CSV: {error}", "quotes in pairs, and lines that end in LF or CRLF")


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _records(reader: Any, header: list[str], relative: str) -> Iterator[Row | Fault]:
    while True:
        where = f"{relative}:{reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Fault(where, "", f"not CSV: {error}", "quotes in pairs")
            return
        if cells is None:
            return
        if not cells:
            continue  # a blank line
        if len(cells) != len(header):
            yield Fault(where, "", f"{len(cells)} fields", f"{len(header)} fields, as in the header")
        else:
            yield Row(where, dict(zip(header, cells, strict=True)))


# --- columns -------------------------------------------------------------------------------------


def _seekable(stack: ExitStack, path: Path, compression: str | None) -> IO[bytes]:
    """A file that can be read at any position; a compressed one is unpacked to disk, not to memory."""
    if compression is None:
        return stack.enter_context(path.open("rb"))
    plain = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed by the stack
    with ExitStack() as inner:
        file = _open(inner, path, compression)
        while chunk := file.read(_CHUNK):
            plain.write(chunk)
    plain.seek(0)
    return plain


def _read_parquet(stack: ExitStack, path: Path, relative: str, compression: str | None) -> Iterator[Row | Fault]:
    import pyarrow.parquet as pq

    file = stack.enter_context(pq.ParquetFile(_seekable(stack, path, compression), buffer_size=_CHUNK))
    yield from _batches(file.iter_batches(batch_size=_BATCH), relative)


def _read_arrow(stack: ExitStack, path: Path, relative: str, compression: str | None) -> Iterator[Row | Fault]:
    import pyarrow as pa

    file = _seekable(stack, path, compression)
    head = file.read(6)
    file.seek(0)
    if head == b"ARROW1":
        reader = stack.enter_context(pa.ipc.open_file(file))
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = iter(stack.enter_context(pa.ipc.open_stream(file)))
    yield from _batches(batches, relative)


def _batches(batches: Iterator[Any], relative: str) -> Iterator[Row | Fault]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            yield Fault(relative, twice, "two columns have this name", "each name once")
            return
        for start in range(0, batch.num_rows, _BATCH):
            for value in batch.slice(start, _BATCH).to_pylist():
                number += 1
                yield Row(f"{relative} row {number}", value)


READERS: Mapping[str, Callable[[ExitStack, Path, str, str | None], Iterator[Row | Fault]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_tsv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
