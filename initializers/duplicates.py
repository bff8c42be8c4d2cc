"""Rows that occur twice, and held-out rows that are trained on: counted exactly, in bounded memory."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from initializers.messages import Example, Prompt

Hashes = npt.NDArray[np.uint64]
IN_MEMORY = 4 << 20
"""Bytes of hashes of one split kept in memory; beyond, they are on disk: 8 bytes a row."""
PASS_HASHES = 4 << 20
"""Hashes of one split that are compared at once."""


class Duplicates:
    """Remembers every row of the splits by a hash of 64 bits.

    Args:
        scratch: directory for the hashes of large data sets. Default: the system's for temporary files.
    """

    def __init__(self, scratch: str | Path | None = None) -> None:
        self._scratch, self._stack = None if scratch is None else str(scratch), ExitStack()
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Duplicates:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, split: str, examples: list[Example]) -> None:
        """Remember rows of a split."""
        file = self._files.get(split)
        if file is None:
            spool = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=self._scratch)  # noqa: SIM115 - closed by the stack
            file = self._files[split] = self._stack.enter_context(spool)
        file.write(b"".join(map(_hash, examples)))

    def repeated(self, split: str) -> int:
        """Rows of a split beyond the first of their kind."""
        rows = self._rows(split)
        return rows - sum(len(hashes) for hashes, _ in self._passes(split, None))

    def shared(self, split: str, other: str) -> int:
        """Rows of `split` that occur in `other` too, repeated ones counted each time."""
        return sum(int(np.isin(hashes, others).sum()) for hashes, others in self._passes(split, other))

    def _rows(self, split: str) -> int:
        return self._files[split].seek(0, 2) // 8 if split in self._files else 0

    def _passes(self, split: str, other: str | None) -> Iterator[tuple[Hashes, Hashes]]:
        """The hashes of both splits, one part of their range after the other.

        With `other`, those of `split` as often as they occur; without, each once.
        """
        passes = -(-max(self._rows(split), self._rows(other or split)) // PASS_HASHES)
        for index in range(passes):
            mine = self._part(split, index, passes)
            if other is None:
                yield np.unique(mine), mine[:0]
            else:
                yield mine, self._part(other, index, passes)

    def _part(self, split: str, index: int, passes: int) -> Hashes:
        """The hashes of one part of the range; hashes are even, so parts are of about one size."""
        found = []
        if split in self._files:
            self._files[split].seek(0)
            while chunk := self._files[split].read(1 << 20):
                hashes = np.frombuffer(chunk, np.uint64)
                found.append(hashes[hashes % np.uint64(passes) == np.uint64(index)] if passes > 1 else hashes)
        return np.concatenate(found) if found else np.empty(0, np.uint64)


def _hash(example: Example) -> bytes:
    """8 bytes that tell rows apart by what is trained: a prompt by its question and reference, not by other columns."""
    content = (example.asked, example.reference) if isinstance(example, Prompt) else example
    return hashlib.blake2b(repr(content).encode("utf-8", "surrogatepass"), digest_size=8).digest()
