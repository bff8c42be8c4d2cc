"""`builtin://name`: the small model and data set that ship with the package and need no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from blueprints.digests import hash_file
from blueprints.errors import UsageError
from initializers import builtin
from initializers.settings import Request
from initializers.sources.types import Resolved, hidden, ignored
from initializers.workspace import copy_file


class BuiltinSource:
    """Files of the installed package."""

    def inputs(self, request: Request) -> Mapping[str, object]:
        """The content of every file: they are small, and change with the package."""
        return {name: hash_file(path) for name, path in self.local_files(request).items()}

    def local_files(self, request: Request) -> dict[str, Path]:
        """The files by relative path.

        Raises:
            UsageError: nothing is embedded under this name.
        """
        name = request.uri.partition("://")[2].strip("/")
        try:
            root = builtin.model_path(name) if request.kind == "model" else builtin.dataset_path(name)
        except LookupError as error:
            raise UsageError(str(error.args[0]), where="STORAGE_URI") from None
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
        return {
            relative: path
            for relative, path in files.items()
            if not hidden(relative) and not ignored(relative, request.ignore_patterns)
        }

    def fetch(self, request: Request, destination: Path, on_bytes: Callable[[int, int | None], None]) -> Resolved:
        """Copy the files."""
        return copy_all(self.local_files(request), destination, on_bytes)


def copy_all(files: Mapping[str, Path], destination: Path, on_bytes: Callable[[int, int | None], None]) -> Resolved:
    """Copy `files` (relative path to source) into `destination`, with sizes and digests."""
    total = sum(path.stat().st_size for path in files.values())
    done, entries = 0, []
    on_bytes(0, total)
    for relative, path in files.items():
        copied = copy_file(path, destination / relative, relative)
        entries.append(copied)
        done += copied.size
        on_bytes(done, total)
    return Resolved(revision=None, files=tuple(entries))
