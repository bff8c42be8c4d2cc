"""The workspace contract: a directory that is there is complete.

Each step builds in a hidden sibling, verifies, writes `_manifest.json` last, and swaps the sibling in by renames. Under
a lock, so that two processes never build the same directory; recovered at the next start, whatever killed the last one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blueprints.digests import hash_file
from blueprints.errors import EnvironmentFault

MANIFEST = "_manifest.json"
MANIFEST_VERSION = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file of a directory: path relative to it (with `/`), size in bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """The entry as the manifest holds it."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


def entry(root: Path, path: Path) -> FileEntry:
    """The manifest entry of `path`, a file under `root`."""
    return FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, hash_file(path))


def copy_file(source: Path, target: Path, relative: str) -> FileEntry:
    """Copy one file, hashing on the way.

    Raises:
        OSError: the file cannot be read, or the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sha, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_CHUNK):
            sha.update(chunk)
            size += len(chunk)
            writer.write(chunk)
    return FileEntry(relative, size, sha.hexdigest())


def link_file(source: Path, target: Path) -> None:
    """`target` with the content of `source` and no copy where the file system can; the original is never changed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # no hard links here (some network file systems)
        shutil.copyfile(source, target)


class Area:
    """One directory of the workspace (`model` or `dataset`) and the hidden files beside it.

    Args:
        workspace: the directory that holds it; created if missing.
        name: the directory's name.

    Raises:
        EnvironmentFault: the workspace cannot be created or written.
    """

    def __init__(self, workspace: Path, name: str) -> None:
        self.workspace, self.name = workspace, name
        self.path = workspace / name
        self._old = workspace / f".{name}.old"
        try:
            workspace.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(workspace, error) from None

    @contextlib.contextmanager
    def locked(self, waiting: str = "") -> Iterator[None]:
        """Hold the directory's lock; `waiting` is printed if another process has it. Recovers what that one left."""
        try:
            descriptor = os.open(self.workspace / f".{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(self.workspace, error) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(waiting or f"waiting: another process is preparing {self.path}", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._recover()
            yield
        finally:
            os.close(descriptor)

    def _put_aside(self) -> None:
        """Move the present directory out of the way: for good if no step made it, else until the swap is done."""
        if self.path.is_symlink() or not self.path.is_dir() or (self.path / MANIFEST).exists():
            remove(self._old)
            self.path.rename(self._old)  # killed here: _recover moves it back
            return
        if not any(self.path.iterdir()):
            self.path.rmdir()
            return
        kept = next(path for n in itertools.count(1) if not (path := self.workspace / f"{self.name}.kept-{n}").exists())
        self.path.rename(kept)
        print(f"note: {self.path} had no {MANIFEST}, so no step made it; it is now {kept}", flush=True)

    def _recover(self) -> None:
        """Undo what a killed process left: its temporaries go, a directory it had moved aside comes back."""
        for leftover in self.workspace.glob(f".{self.name}.tmp-*"):
            remove(leftover)
        if self._old.exists():
            if self.path.exists():
                remove(self._old)
            else:
                self._old.rename(self.path)

    def manifest(self) -> dict[str, Any] | None:
        """The directory's manifest; None if there is no complete directory."""
        try:
            data = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) and data.get("manifest_version") == MANIFEST_VERSION else None

    def damage(self, files: Sequence[Mapping[str, Any]]) -> str:
        """Why the files on disk are not those of the manifest, empty if they are.

        Sizes are always compared; a file changed after the manifest was written is hashed again.
        """
        written = (self.path / MANIFEST).stat().st_mtime_ns
        for item in files:
            path = self.path / str(item["path"])
            try:
                stat = path.stat()
            except OSError:
                return f"{item['path']} is missing"
            if stat.st_size != item["size"]:
                return f"{item['path']} has {stat.st_size} bytes instead of {item['size']}"
            if stat.st_mtime_ns > written and hash_file(path) != item["sha256"]:
                return f"{item['path']} has changed"
        return ""

    @contextlib.contextmanager
    def building(self) -> Iterator[Path]:
        """A fresh hidden sibling to build in; removed unless `publish` took it."""
        temporary = self.workspace / f".{self.name}.tmp-{os.getpid()}"
        remove(temporary)
        try:
            temporary.mkdir()
        except OSError as error:
            raise _unwritable(self.workspace, error) from None
        try:
            yield temporary
        finally:
            # What a download thread still writes may stay behind; the next start removes it.
            shutil.rmtree(temporary, ignore_errors=True)

    def publish(self, temporary: Path, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, flush everything to disk and swap `temporary` in. The old directory goes last."""
        sync_tree(temporary)
        target = temporary / MANIFEST
        content = {"manifest_version": MANIFEST_VERSION} | dict(manifest)
        target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _sync(target)
        _sync(temporary)
        if self.path.exists() or self.path.is_symlink():
            self._put_aside()
        temporary.rename(self.path)
        _sync(self.workspace)
        remove(self._old)


def remove(path: Path) -> None:
    """Remove a file or a directory tree, whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_tree(root: Path) -> None:
    """Flush every file and directory under `root` to disk."""
    for directory, _, files in os.walk(root):
        for name in files:
            _sync(Path(directory) / name)
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"cannot write to the workspace: {error.strerror or error}",
        where=str(path),
        todo="mount a writable volume there, or set BLUEPRINTS_WORKSPACE to a directory you can write",
    )
