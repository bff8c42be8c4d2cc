"""The embedded model and dataset behind `builtin://`: small files that need no network."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_HERE = Path(__file__).parent

MODELS: Mapping[str, Path] = MappingProxyType({"tiny-llama": _HERE / "models" / "tiny-llama"})
DATASETS: Mapping[str, Path] = MappingProxyType({"orders": _HERE / "data" / "orders"})


def model_path(name: str) -> Path:
    """The folder of `builtin://<name>`, as `from_pretrained` reads it.

    Raises:
        LookupError: no embedded model has this name; the message lists those that exist.
    """
    return _find("model", MODELS, name)


def dataset_path(name: str) -> Path:
    """The folder of `builtin://<name>`, with one JSON Lines file per split (train, test).

    Raises:
        LookupError: no embedded dataset has this name; the message lists those that exist.
    """
    return _find("dataset", DATASETS, name)


def _find(kind: str, known: Mapping[str, Path], name: str) -> Path:
    if name not in known:
        names = ", ".join(f"builtin://{each}" for each in sorted(known))
        raise LookupError(f"no embedded {kind} is called builtin://{name}; known: {names}")
    return known[name]
