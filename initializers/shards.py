"""Prepared sequences on disk: Arrow IPC streams that `datasets.Dataset.from_file` maps into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa

from blueprints.recipe.rows import Kind
from initializers.packing import best_fit_decreasing

SHARD_BYTES = 64 << 20
BATCH_BYTES = 4 << 20
BATCH_ROWS = 1000
WINDOW_ROWS = 10_000
WINDOW_TOKENS = 4 << 20
"""Bounds of the documents that are packed together: together they bound memory."""


class _Hashing:
    """A file that hashes what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha, self.size, self.closed = file, hashlib.sha256(), 0, False

    def write(self, data: Any) -> int:
        self.sha.update(data)
        self.size += len(data)
        self.file.write(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self.file.close()


IDS, FLAGS, COUNT, TEXT = pa.list_(pa.int32()), pa.list_(pa.int8()), pa.int32(), pa.string()
Columns = dict[str, pa.DataType]
Sequence = Mapping[str, Any]
"""One prepared sequence: a value for every column."""


def columns_of(kind: Kind, *, held_out: bool, packed: bool = False, prompts: bool = False) -> Columns:
    """The columns of prepared sequences.

    Args:
        kind: what the rows become.
        held_out: of an evaluation split, whose sequences can be shown to people.
        packed: several documents fill a sequence (supervised).
        prompts: where a supervised sequence's last answer begins is noted in training too.

    Returns:
        `supervised`: `input_ids`, `completion_mask` (1: the token carries loss); packed, `seq_lengths` (tokens of each
        document of the sequence); `prompt_length` (tokens before the last answer; 0: plain text) and, held out,
        `prompt` (what is asked, without the template). `preference`: `prompt_ids`, `chosen_ids`, `rejected_ids`; held
        out, their texts `prompt`, `chosen`, `rejected`. `prompt`: `prompt_ids`; `prompt`; `messages` (JSON: the
        prompt as its row has it, messages or a text); `columns` (JSON: the row's other columns); `reference` (the right answer).
    """
    if kind == "preference":
        texts = {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT} if held_out else {}
        return {"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS} | texts
    if kind == "prompt":
        return {"prompt_ids": IDS, "prompt": TEXT, "messages": TEXT, "columns": TEXT, "reference": TEXT}
    columns = {"input_ids": IDS, "completion_mask": FLAGS}
    if packed:
        return columns | {"seq_lengths": IDS}
    if held_out:
        return columns | {"prompt": TEXT, "prompt_length": COUNT}
    return columns | ({"prompt_length": COUNT} if prompts else {})


class ShardWriter:
    """Writes sequences into `shard-NNNNN.arrow` files of about 64 MB.

    Args:
        directory: created; must not exist.
        columns: names and types, as `columns_of` gives them.
        capacity: pack documents into sequences of at most this many tokens. None: one document per sequence.
    """

    def __init__(self, directory: Path, columns: Columns, capacity: int | None = None) -> None:
        self.directory, self.columns, self.capacity = directory, columns, capacity
        self.shards: list[dict[str, Any]] = []
        self.sequences = self.tokens = self.trained_tokens = 0
        self._window: list[Sequence] = []
        self._window_tokens = 0
        self._rows: list[Sequence] = []
        self._row_bytes = 0
        self._writer: Any = None
        self._file: _Hashing | None = None
        self._schema = pa.schema(list(columns.items()))
        directory.mkdir(parents=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._pack()
            self._write_batch()
            self._roll()
        elif self._file is not None:
            self._file.close()

    def add(self, document: Sequence) -> None:
        """Take one document; packed, of at least one and at most `capacity` tokens."""
        if self.capacity is None:
            self._emit(document)
            return
        self._window.append(document)
        self._window_tokens += len(document["input_ids"])
        if len(self._window) >= WINDOW_ROWS or self._window_tokens >= WINDOW_TOKENS:
            self._pack()

    def _pack(self) -> None:
        if self.capacity is None or not self._window:
            return
        for members in best_fit_decreasing([len(item["input_ids"]) for item in self._window], self.capacity):
            documents = [self._window[index] for index in members]
            joined = {
                name: np.concatenate([item[name] for item in documents]) for name in ("input_ids", "completion_mask")
            }
            lengths = np.asarray([len(item["input_ids"]) for item in documents], np.int32)
            self._emit(joined | {"seq_lengths": lengths})
        self._window, self._window_tokens = [], 0

    def _emit(self, sequence: Sequence) -> None:
        self._rows.append(sequence)
        for name, kind in self.columns.items():
            if kind == TEXT:
                self._row_bytes += 2 * len(sequence[name])
            elif kind == IDS and name != "seq_lengths":
                size = len(sequence[name])
                self.tokens += size
                self.trained_tokens += size if name in ("chosen_ids", "rejected_ids") else 0
                self._row_bytes += 5 * size
            elif kind == FLAGS:
                self.trained_tokens += int(sequence[name].sum())
        self.sequences += 1
        if len(self._rows) >= BATCH_ROWS or self._row_bytes >= BATCH_BYTES:
            self._write_batch()

    def _write_batch(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            path = self.directory / f"shard-{len(self.shards):05d}.arrow"
            self._file = _Hashing(path.open("wb"))
            self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), self._schema)
            self.shards.append({"path": path.name, "sequences": 0, "size": 0, "sha256": ""})
        arrays = [_array([row[name] for row in self._rows], kind) for name, kind in self.columns.items()]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self.shards[-1]["sequences"] += len(self._rows)
        self._rows, self._row_bytes = [], 0
        assert self._file is not None
        if self._file.size >= SHARD_BYTES:
            self._roll()

    def _roll(self) -> None:
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.close()
        self.shards[-1] |= {"size": self._file.size, "sha256": self._file.sha.hexdigest()}
        self._writer = self._file = None


def _array(values: list[Any], kind: pa.DataType) -> Any:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(values), kind.value_type))
