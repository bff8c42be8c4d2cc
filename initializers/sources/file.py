"""`file:///path`: a file, a directory or a glob on a disk that this process can read."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from blueprints.errors import DataError, UsageError
from initializers.settings import Request
from initializers.sources.builtin import copy_all
from initializers.sources.types import Resolved, hidden, ignored, made_by_steps


class FileSource:
    """Files of a mounted or local directory. They are copied: the workspace never depends on the original again."""

    def inputs(self, request: Request) -> Mapping[str, object]:
        """Path, size and time of change of every file."""
        stats = {name: path.stat() for name, path in self.local_files(request).items()}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}

    def local_files(self, request: Request) -> dict[str, Path]:
        """The files by relative path, links followed.

        Raises:
            UsageError: the URI has a relative path, another host, or names nothing.
            DataError: it names something that is not what was asked for (no file matches, a model without config.json).
        """
        path = local_path(request.uri)
        if request.kind == "model":
            _require_model_directory(path, request)
        if path.is_dir():
            files = dict(_walk(path))
        elif path.is_file():
            return {path.name: path}  # named by the user: never hidden or ignored
        elif path.exists():
            raise UsageError(f"{path} is not a regular file", where="STORAGE_URI", todo="copy its rows into a file")
        elif glob.has_magic(str(path)):
            files = _matches(str(path))
        else:
            raise _missing(path, request.uri)
        return _usable(files, request)

    def fetch(self, request: Request, destination: Path, on_bytes: Callable[[int, int | None], None]) -> Resolved:
        """Copy the files.

        Raises:
            UsageError: the source lies in the directory that this step replaces.
        """
        files = self.local_files(request)
        target = destination.parent / request.directory
        if any(path.resolve().is_relative_to(target.resolve()) for path in files.values()):
            raise UsageError(
                f"the source lies in {target}, which this step replaces",
                where="STORAGE_URI",
                todo="name the original files, or set BLUEPRINTS_WORKSPACE to another directory",
            )
        return copy_all(files, destination, on_bytes)


def local_path(uri: str) -> Path:
    """The path that a `file://` URI names, percent escapes decoded.

    Raises:
        UsageError: it is relative, or on another host.
    """
    rest = uri.partition("://")[2]
    rest = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not rest.startswith("/"):
        near = Path(rest).absolute()
        todo = f"write file://{near}" if near.exists() else "write three slashes: file:///absolute/path"
        raise UsageError(f"{uri!r} has no absolute path", where="STORAGE_URI", todo=todo)
    if "\0" in unquote(rest):
        raise UsageError(f"{uri!r} has a NUL character", where="STORAGE_URI")
    # A name with a literal % that is not an escape is taken as it stands if only that exists.
    plain, decoded = Path(rest), Path(unquote(rest))
    return plain if plain.exists() and not decoded.exists() else decoded


def _require_model_directory(path: Path, request: Request) -> None:
    wanted, other = ("config.json", "adapter_config.json")
    if request.directory == "adapter":
        wanted, other = other, wanted
    if path.is_file():
        what = "an adapter" if request.directory == "adapter" else "a model"
        raise DataError(f"{request.uri} is a file", where="STORAGE_URI", todo=f"{what} is a directory with a {wanted}")
    if not path.is_dir() or (path / wanted).is_file():
        return
    if request.directory == "adapter":
        holds, todo = (
            "a whole model, not an adapter",
            "name the directory of an adapter, as PEFT's save_pretrained writes it",
        )
    else:
        holds, todo = "an adapter, not a model", "name the base model's directory"
    if not (path / other).is_file():
        holds = ""
        if request.directory != "adapter":
            todo = "name the directory that `save_pretrained` wrote (config.json, *.safetensors, tokenizer files)"
    raise DataError(
        f"the directory has no {wanted}" + (f": it holds {holds}" if holds else ""), where=str(path), todo=todo
    )


def _missing(path: Path, uri: str) -> UsageError:
    if path.is_symlink():
        return UsageError(f"{path} is a link to {path.readlink()}, which does not exist", where="STORAGE_URI")
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    return UsageError(
        f"{path} does not exist",
        where="STORAGE_URI",
        todo=f"{uri} must name a file, a directory or a glob; the path exists up to {parent}",
    )


def _matches(pattern: str) -> dict[str, Path]:
    """Files of a glob, named relative to the longest directory without wildcards."""
    parts = Path(pattern).parts
    fixed = Path(*parts[: next(index for index, part in enumerate(parts) if glob.has_magic(part))])
    found: dict[str, Path] = {}
    inner = str(Path(pattern).relative_to(fixed))
    for name in sorted(glob.glob(inner, root_dir=fixed, recursive=True)):  # noqa: PTH207 - Path.glob skips ** links
        path = fixed / name
        if path.is_dir():
            found |= {f"{path.relative_to(fixed).as_posix()}/{inner}": file for inner, file in _walk(path)}
        elif path.exists():
            found[path.relative_to(fixed).as_posix()] = path
    if not found:
        raise UsageError(f"no file matches {pattern}", where="STORAGE_URI", todo=f"look at what is in {fixed}")
    return found


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Every regular file under `root` in a stable order; links are followed, circles are cut."""
    seen: set[str] = set()
    for directory, subdirectories, names in os.walk(root, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen:
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories.sort()
        for name in sorted(names):
            path = Path(directory) / name
            if path.is_file() or path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def _usable(files: Mapping[str, Path], request: Request) -> dict[str, Path]:
    usable: dict[str, Path] = {}
    wanted = [name for name in sorted(files) if not hidden(name) and not ignored(name, request.ignore_patterns)]
    own = made_by_steps(wanted, request.kind)
    for relative in wanted:
        path = files[relative]
        if relative in own:
            continue
        if not path.exists():
            raise UsageError(f"{path} is a link to {path.readlink()}, which does not exist", where="STORAGE_URI")
        if not path.is_file():
            raise UsageError(f"{path} is not a regular file", where="STORAGE_URI", todo="copy its rows into a file")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{path} may not be read", where="STORAGE_URI", todo="check its permissions")
        usable[relative] = path
    if not usable:
        raise DataError(
            f"{request.uri} has no files" + (" that are not hidden or ignored" if files else ""),
            where="STORAGE_URI",
            todo="check the path and IGNORE_PATTERNS",
        )
    return usable
