"""What every source hands back, and the file selection they share."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from blueprints.errors import UsageError
from initializers.settings import Kind
from initializers.workspace import MANIFEST, FileEntry


@dataclass(frozen=True)
class Resolved:
    """What a fetch brought.

    Attributes:
        revision: the exact revision (commit) fetched; None where the source has none.
        files: every file, with size and sha256.
        notes: lines worth a place in the log.
    """

    revision: str | None
    files: tuple[FileEntry, ...]
    notes: tuple[str, ...] = ()


PREPARED = "prepared"
"""Directory of a data set in the workspace that holds what was made of its rows."""


def made_by_steps(names: Collection[str], kind: Kind) -> set[str]:
    """The files of a source that an earlier step made, where the source is itself a directory of a workspace.

    Raises:
        UsageError: the source has files of its own under the name of the prepared rows.
    """
    own = {name for name in names if name == MANIFEST}
    if kind == "dataset":
        prepared = {name for name in names if name.startswith(f"{PREPARED}/")}
        if prepared and not own:
            raise UsageError(
                f"the source has a directory {PREPARED}/, which the workspace keeps for prepared rows",
                where="STORAGE_URI",
                todo=f"rename it, name it as the source itself, or leave it out: IGNORE_PATTERNS={PREPARED}/*",
            )
        own |= prepared
    return own


def hidden(relative: str) -> bool:
    """Whether a path has a hidden part (`.git/config`, `.gitattributes`)."""
    return any(part.startswith(".") for part in relative.split("/"))


def ignored(relative: str, patterns: Iterable[str]) -> bool:
    """Whether `relative` matches one of the globs, as a whole path or by its name."""
    name = relative.rsplit("/", 1)[-1]
    return any(
        fnmatch.fnmatchcase(relative, pattern)
        or fnmatch.fnmatchcase(name, pattern)
        or (pattern.endswith("/") and relative.startswith(pattern))
        for pattern in patterns
    )
