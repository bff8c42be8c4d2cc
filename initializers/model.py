"""The model step: source → `model/`, as `from_pretrained` reads it, verified."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blueprints.errors import DataError
from blueprints.progress import Progress
from initializers.dataset import fetch, fetch_fingerprint, say
from initializers.settings import Settings
from initializers.sources.hub import PICKLES
from initializers.workspace import Area

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_HEADER_LIMIT = 100_000_000
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def run_model(settings: Settings, progress: Progress) -> int:
    """Make `model/` complete for these settings; does nothing if it is already.

    Raises:
        UsageError: the source cannot be used.
        DataError: what it holds is no model that can be loaded safely.
        EnvironmentFault: network, disk or permissions.
    """
    area = Area(settings.workspace, "model")
    with area.locked():
        fingerprint = fetch_fingerprint(settings.request)
        old = area.manifest()
        if old is not None:
            changed = old.get("fingerprint") != fingerprint
            damage = "" if changed else area.damage(old["files"])
            if not changed and not damage:
                say(f"nothing to do: {area.path} is complete for these inputs")
                progress.update("done", message="nothing to do")
                return 0
            say(
                "the source or its settings changed: fetching again"
                if changed
                else f"damaged ({damage}): fetching again"
            )
        with area.building() as temporary:
            manifest = fetch(settings.request, temporary, fingerprint, progress)
            progress.update("validate", message="checking the model's files")
            manifest |= check_model(temporary)
            area.publish(temporary, manifest)
    say(f"done: {area.path}")
    progress.update("done", message="model ready")
    return 0


def check_model(root: Path) -> dict[str, Any]:
    """Check that a directory is a model that can be loaded: configuration, weights, tokenizer.

    Returns:
        for the manifest: `model_type`, `architectures`, `parameters` (number of weights) and `dtypes`.

    Raises:
        DataError: with the file and the reason.
    """
    config = read_object(root / "config.json")
    weights = sorted(path for path in root.glob("*.safetensors"))
    if not weights:
        weights = _no_safetensors(root)
    tensors: dict[str, Path] = {}
    count, dtypes = 0, set()
    for path in weights:
        for name, item in read_header(path).items():
            tensors[name] = path
            count += _size(item["shape"])
            dtypes.add(item["dtype"])
    for index in sorted(root.glob("*.safetensors.index.json")):
        _check_index(index, tensors)
    if not any((root / name).is_file() for name in TOKENIZERS):
        raise DataError(
            "the model has no tokenizer files",
            where="model",
            todo=f"add the tokenizer of the model (one of {', '.join(TOKENIZERS)})",
        )
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "parameters": count or None,
        "dtypes": sorted(dtypes),
    }


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"the model has no {path.name}", where="model", todo="name a Transformers model") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=path.name, todo="fetch the file again") from None
    if not isinstance(value, dict):
        raise DataError("not a JSON object", where=path.name, todo="fetch the file again")
    return value


def _no_safetensors(root: Path) -> list[Path]:
    pickles = sorted(
        path.name for path in root.iterdir() if path.suffix in PICKLES and path.name != "training_args.bin"
    )
    if pickles:
        say(f"warning: the weights are pickles ({', '.join(pickles)}), which can run code when they are loaded")
        return []
    raise DataError(
        "the model has no weights in safetensors format",
        where="model",
        todo="use a model with *.safetensors files; pickles (*.bin, *.pt) can run code when they are loaded and are "
        "only fetched with model.ignore_patterns=[]",
    )


def read_header(path: Path) -> dict[str, Mapping[str, Any]]:
    """The tensors of a safetensors file by name, after checking that the file is as long as its header says.

    Raises:
        DataError: the header is damaged, or does not fit the file.
    """

    def broken(problem: str) -> DataError:
        return DataError(problem, where=path.name, todo="the file is damaged or incomplete: fetch it again")

    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise broken(f"the file has {size} bytes: too short for safetensors")
        if start == b"version ":
            raise DataError(
                "a Git LFS pointer in the place of the weights",
                where=path.name,
                todo="run `git lfs pull` where the model was cloned, or name it as hf://org/name",
            )
        (length,) = struct.unpack("<Q", start)
        if length > min(_HEADER_LIMIT, size - 8):
            raise broken(f"its header claims {length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise broken("its header is not JSON") from None
    if not isinstance(header, dict):
        raise broken("its header is not a JSON object")
    header.pop("__metadata__", None)
    end = 0
    for name, item in sorted(header.items(), key=lambda pair: _offsets(pair[1], broken)):
        first, last = _offsets(item, broken)
        bits = _BITS.get(str(item.get("dtype")))
        if first != end or last < first or (bits is not None and (last - first) * 8 != _size(item["shape"]) * bits):
            raise broken(f"the offsets of tensor {name} do not fit")
        end = last
    if end != size - 8 - length:
        raise broken(f"the tensors need {8 + length + end} bytes, the file has {size}")
    return header


def _offsets(item: Any, broken: Any) -> tuple[int, int]:
    match item:
        case {"data_offsets": [int(first), int(last)], "shape": [*shape], "dtype": str()} if all(
            isinstance(dimension, int) for dimension in shape
        ):
            return first, last
    raise broken("its header has a tensor without offsets, shape or dtype")


def _size(shape: list[int]) -> int:
    total = 1
    for dimension in shape:
        total *= dimension
    return total


def _check_index(index: Path, tensors: Mapping[str, Path]) -> None:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise DataError("no weight_map", where=index.name, todo="fetch the file again")
    for name, file in weight_map.items():
        if not (index.parent / str(file)).is_file():
            raise DataError(f"names {file}, which is not there", where=index.name, todo="fetch the model again")
        if name not in tensors or tensors[name].name != file:
            raise DataError(f"tensor {name} is not in {file}", where=index.name, todo="fetch the model again")
