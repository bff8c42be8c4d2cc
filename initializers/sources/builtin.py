"""`builtin://name`: the small model and data set that ship with the package and need no network."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from blueprints.digests import hash_file
from blueprints.errors import UsageError
from initializers import builtin
from initializers.settings import Request
from initializers.sources.types import Resolved, hidden, ignored
from initializers.workspace import copy_file, entry

WEIGHTS, ADAPTER = "model.safetensors", "adapter.safetensors"


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
        roots = [builtin.model_path(builtin.ADAPTED[name]), root] if name in builtin.ADAPTED else [root]
        files = {
            path.relative_to(each).as_posix(): path
            for each in roots
            for path in sorted(each.rglob("*"))
            if path.is_file()
        }
        return {
            relative: path
            for relative, path in files.items()
            if not hidden(relative) and not ignored(relative, request.ignore_patterns)
        }

    def fetch(self, request: Request, destination: Path, on_bytes: Callable[[int, int | None], None]) -> Resolved:
        """Copy the files; of a model with an adapter, add that to the weights."""
        files = self.local_files(request)
        adapter = files.pop(ADAPTER, None)
        if adapter is None:
            return copy_all(files, destination, on_bytes)
        base = files.pop(WEIGHTS)
        copied = copy_all(files, destination, on_bytes)
        add_adapter(base, adapter, destination / WEIGHTS)
        return replace(copied, files=(*copied.files, entry(destination, destination / WEIGHTS)))


def add_adapter(base: Path, adapter: Path, target: Path) -> None:
    """Write the weights of `base` in float32, with the adapter's matrices added: W + scale * B @ A.

    Args:
        base: weights in bfloat16.
        adapter: `W.A` and `W.B` in float16 for each adapted weight W, and `scale` in its metadata.
        target: the file to write.
    """
    with safe_open(adapter, framework="numpy") as found:
        scale = float(found.metadata()["scale"])
        matrices = {name: found.get_tensor(name).astype(np.float64) for name in found.keys()}  # noqa: SIM118 - no dict
    weights = read_bfloat16(base)
    for name in {key.rpartition(".")[0] for key in matrices}:
        # In double precision, so that it rounds to the same weights whatever order a machine sums in.
        update = scale * (matrices[f"{name}.B"] @ matrices[f"{name}.A"])
        weights[name] = (weights[name] + update).astype(np.float32)
    save_file(weights, target, metadata={"format": "pt"})


def read_bfloat16(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a safetensors file whose weights are all bfloat16, a type that numpy lacks."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    found = {}
    for name, item in header.items():
        if name != "__metadata__":
            first, last = item["data_offsets"]
            halves = np.frombuffer(data[first:last], "<u2").astype("<u4") << 16
            found[name] = halves.view("<f4").reshape(item["shape"])
    return found


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
