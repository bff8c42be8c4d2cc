"""Prepared sequences on disk: Arrow IPC streams that `datasets.Dataset.from_file` maps into memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa

from initializers.packing import best_fit_decreasing
from initializers.tokens import Tokens

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


class ShardWriter:
    """Writes sequences into `shard-NNNNN.arrow` files of about 64 MB.

    Columns: `input_ids` list<int32>, `completion_mask` list<int8> (1: the token carries loss); packed, `seq_lengths`
    list<int32> (tokens of each document of the sequence); of held-out rows `prompt` string (what is asked, without the
    template) and `prompt_length` int32 (tokens before the last answer; 0: plain text).

    Args:
        directory: created; must not exist.
        capacity: pack documents into sequences of at most this many tokens. None: one document per sequence.
        asks: write the columns of held-out rows; not together with `capacity`.
    """

    def __init__(self, directory: Path, capacity: int | None = None, *, asks: bool = False) -> None:
        self.directory, self.capacity, self.asks = directory, capacity, asks
        self.shards: list[dict[str, Any]] = []
        self.sequences = self.tokens = self.trained_tokens = 0
        self._window: list[Tokens] = []
        self._window_tokens = 0
        self._rows: list[tuple[Tokens, list[int]]] = []
        self._row_tokens = 0
        self._writer: Any = None
        self._file: _Hashing | None = None
        fields = [("input_ids", pa.list_(pa.int32())), ("completion_mask", pa.list_(pa.int8()))]
        if capacity is not None:
            fields.append(("seq_lengths", pa.list_(pa.int32())))
        if asks:
            fields += [("prompt", pa.string()), ("prompt_length", pa.int32())]
        self._schema = pa.schema(fields)
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

    def add(self, document: Tokens) -> None:
        """Take one document of at least one and, packed, at most `capacity` tokens."""
        if self.capacity is None:
            self._emit(document, [len(document.ids)])
            return
        self._window.append(document)
        self._window_tokens += len(document.ids)
        if len(self._window) >= WINDOW_ROWS or self._window_tokens >= WINDOW_TOKENS:
            self._pack()

    def _pack(self) -> None:
        if self.capacity is None or not self._window:
            return
        for members in best_fit_decreasing([len(item.ids) for item in self._window], self.capacity):
            documents = [self._window[index] for index in members]
            joined = Tokens(
                np.concatenate([item.ids for item in documents]), np.concatenate([item.mask for item in documents])
            )
            self._emit(joined, [len(item.ids) for item in documents])
        self._window, self._window_tokens = [], 0

    def _emit(self, sequence: Tokens, lengths: list[int]) -> None:
        self._rows.append((sequence, lengths))
        self._row_tokens += len(sequence.ids)
        self.sequences += 1
        self.tokens += len(sequence.ids)
        self.trained_tokens += int(sequence.mask.sum())
        if len(self._rows) >= BATCH_ROWS or self._row_tokens * 5 >= BATCH_BYTES:
            self._write_batch()

    def _write_batch(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            path = self.directory / f"shard-{len(self.shards):05d}.arrow"
            self._file = _Hashing(path.open("wb"))
            self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), self._schema)
            self.shards.append({"path": path.name, "sequences": 0, "size": 0, "sha256": ""})
        columns = [
            _lists([sequence.ids for sequence, _ in self._rows], pa.int32()),
            _lists([sequence.mask for sequence, _ in self._rows], pa.int8()),
        ]
        if self.capacity is not None:
            columns.append(_lists([np.asarray(lengths, np.int32) for _, lengths in self._rows], pa.int32()))
        if self.asks:
            columns.append(pa.array([sequence.prompt for sequence, _ in self._rows], pa.string()))
            columns.append(pa.array([sequence.prompt_length for sequence, _ in self._rows], pa.int32()))
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self.shards[-1]["sequences"] += len(self._rows)
        self._rows, self._row_tokens = [], 0
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


def _lists(values: list[Any], kind: Any) -> Any:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(values), kind))
