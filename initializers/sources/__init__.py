"""Where models and data sets come from: one file per URI scheme, one literal table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from blueprints.errors import UsageError
from initializers.settings import Request
from initializers.sources.builtin import BuiltinSource
from initializers.sources.file import FileSource
from initializers.sources.hub import HubSource
from initializers.sources.types import Resolved

__all__ = ["SOURCES", "Resolved", "Source", "source_for"]


class Source(Protocol):
    """How one URI scheme is read."""

    def inputs(self, request: Request) -> Mapping[str, object]:
        """What a fetch depends on, as JSON data and without network: when it changes, the fetch is repeated."""

    def local_files(self, request: Request) -> dict[str, Path] | None:
        """The source's files by relative path where they lie on this machine already; None if they must be fetched."""

    def fetch(self, request: Request, destination: Path, on_bytes: Callable[[int, int | None], None]) -> Resolved:
        """Bring the files into `destination`, calling `on_bytes(done, total)` on the way."""


SOURCES: dict[str, Source] = {
    "builtin": BuiltinSource(),
    "file": FileSource(),
    "hf": HubSource(),
}


def source_for(uri: str) -> Source:
    """The source that reads `uri`.

    Raises:
        UsageError: the URI has no scheme or one that is not known.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or not rest:
        raise UsageError(
            f"not a URI: {uri!r}",
            where="STORAGE_URI",
            todo="write hf://org/name, file:///absolute/path or builtin://name",
        )
    if scheme not in SOURCES:
        raise UsageError(
            f"unknown scheme {scheme}:// in {uri!r}",
            where="STORAGE_URI",
            todo=f"known: {', '.join(f'{name}://' for name in sorted(SOURCES))}",
        )
    return SOURCES[scheme]
