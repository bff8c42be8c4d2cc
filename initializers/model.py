"""The model step: source → `model/`, as `from_pretrained` reads it, verified; a teacher, a reward model and an adapter too."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blueprints.errors import BlueprintError, DataError
from blueprints.progress import Progress
from initializers.dataset import fetch, fetch_fingerprint, say
from initializers.settings import Request, Role, Settings
from initializers.sources.hub import PICKLES
from initializers.vocabulary import require_same_vocabulary
from initializers.workspace import Area

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
TEACHER = "distill.teacher"
Check = Callable[[Path], dict[str, Any]]
_HEADER_LIMIT = 100_000_000
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One model of a run.

    Attributes:
        request: where it comes from and which directory gets it.
        key: the recipe's key that names it, for messages.
        check: checks its files and says what the manifest states of them.
    """

    request: Request
    key: str
    check: Check


def parts(settings: Settings) -> list[Part]:
    """The model, and the further ones that the recipe needs: a teacher, a reward model, an adapter to go on from."""
    found = [Part(settings.request, "STORAGE_URI", check_generator)]

    def add(role: Role, key: str, check: Check, uri: str | None, revision: str | None = None) -> None:
        if uri is not None:
            found.append(Part(replace(settings.request, uri=uri, revision=revision, role=role), key, check))

    recipe = settings.recipe
    if recipe is not None and recipe.distill is not None:
        add("teacher", TEACHER, check_generator, recipe.distill.teacher, recipe.distill.teacher_revision)
    if recipe is not None and recipe.ppo is not None:
        add("reward_model", "ppo.reward_model", check_classifier, recipe.ppo.reward_model)
    if recipe is not None and recipe.lora is not None:
        add("adapter", "lora.from", check_adapter, recipe.lora.from_uri)
    return found


def run_model(settings: Settings, progress: Progress) -> int:
    """Make `model/` and what else of models the recipe needs complete; does nothing for those that are already.

    Raises:
        UsageError: a source cannot be used.
        DataError: what it holds is no model that can be loaded safely, is of another kind than the recipe needs, or
            the teacher has another vocabulary than the model.
        EnvironmentFault: network, disk or permissions.
    """
    wanted, changed = parts(settings), False
    for part in wanted:
        try:
            changed |= bring(settings, part, progress)
        except BlueprintError as error:
            if part.request.role is not None and error.where in ("STORAGE_URI", "model"):
                error.where = part.key
            raise
    if any(part.key == TEACHER for part in wanted):
        trusted = settings.request.trust_remote_code
        workspace = settings.workspace
        require_same_vocabulary(workspace / "model", workspace / "teacher", trust_remote_code=trusted)
    progress.update("done", message="model ready" if changed else "nothing to do")
    return 0


def bring(settings: Settings, part: Part, progress: Progress) -> bool:
    """Make one directory complete; whether it was not."""
    area = Area(settings.workspace, part.request.directory)
    with area.locked():
        fingerprint = fetch_fingerprint(part.request)
        old = area.manifest()
        if old is not None:
            changed = old.get("fingerprint") != fingerprint
            damage = "" if changed else area.damage(old["files"])
            if not changed and not damage:
                say(f"nothing to do: {area.path} is complete for these inputs")
                return False
            say(
                "the source or its settings changed: fetching again"
                if changed
                else f"damaged ({damage}): fetching again"
            )
        with area.building() as temporary:
            manifest = fetch(part.request, temporary, fingerprint, progress)
            progress.update("validate", message="checking the model's files")
            manifest |= part.check(temporary)
            area.publish(temporary, manifest)
    say(f"done: {area.path}")
    return True


def check_generator(root: Path) -> dict[str, Any]:
    """Check a model that generates text.

    Raises:
        DataError: its files cannot be loaded, or it is an adapter or a classifier.
    """
    if (root / "adapter_config.json").is_file() and not (root / "config.json").is_file():
        raise DataError("the source holds an adapter, not a model", where="model", todo="name the base model")
    found = check_model(root)
    names = found["architectures"]
    if _classifies(names):
        raise DataError(
            f"the model classifies text and generates none (architectures: {', '.join(names)})",
            where="model",
            todo="name a model for text generation; a classifier can be the reward of ppo, as ppo.reward_model",
        )
    return found


def check_classifier(root: Path) -> dict[str, Any]:
    """Check a sequence classification model, which scores whole texts.

    Raises:
        DataError: its files cannot be loaded, or it is of another kind.
    """
    if (root / "adapter_config.json").is_file() and not (root / "config.json").is_file():
        raise DataError("the source holds an adapter, not a model", where="model", todo="merge it into its base first")
    found = check_model(root)
    names = found["architectures"] or []
    if not _classifies(names):
        raise DataError(
            "the model is no sequence classification model, so it has no score for a text (architectures: "
            f"{', '.join(names) or 'none'})",
            where="model",
            todo="name a model saved as ...ForSequenceClassification",
        )
    return found


def _classifies(architectures: Any) -> bool:
    names = architectures if isinstance(architectures, list) else []
    return bool(names) and all(str(name).endswith("ForSequenceClassification") for name in names)


def check_adapter(root: Path) -> dict[str, Any]:
    """Check an adapter as PEFT saves it.

    Returns:
        for the manifest: `peft_type`, `r`, `base_model` (as the adapter names it), `parameters`, `dtypes`.

    Raises:
        DataError: its files cannot be loaded, or it is a whole model.
    """
    if not (root / "adapter_config.json").is_file():
        whole = (root / "config.json").is_file()
        raise DataError(
            "the source holds " + ("a whole model, not an adapter" if whole else "no adapter: no adapter_config.json"),
            where="model",
            todo="name the directory of an adapter, as PEFT's save_pretrained writes it",
        )
    config = read_object(root / "adapter_config.json")
    weights = root / "adapter_model.safetensors"
    if not weights.is_file():
        raise DataError(
            "the adapter has no adapter_model.safetensors",
            where="model",
            todo="save it with safe_serialization=True; pickles (*.bin) can run code when they are loaded",
        )
    tensors = read_header(weights)
    return {
        "peft_type": config.get("peft_type"),
        "r": config.get("r"),
        "base_model": config.get("base_model_name_or_path"),
        "parameters": sum(_size(item["shape"]) for item in tensors.values()),
        "dtypes": sorted({str(item["dtype"]) for item in tensors.values()}),
    }


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
