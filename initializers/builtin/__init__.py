"""The embedded models and data sets behind `builtin://`: small files that need no network.

To add a data set `NAME`:

1. write `initializers/builtin/NAME.py` with a function `generate() -> dict[str, str]`: file name (`train.jsonl`,
   `test.jsonl`) to content, from a fixed `random.Random(seed)` and the standard library alone, with rows in one of the
   formats of docs/data-formats.md; no prompt in both splits, below 1.5 MB together;
2. name it in `GENERATORS` of `generate_data.py` and in `BUILTIN_DATASETS` of `blueprints/recipe/schema.py`;
3. run `python -m initializers.builtin.generate_data NAME`, describe it in `README.md` here, and commit `data/NAME/`.

Tests hold every committed file to its generator, byte for byte.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from blueprints.recipe.schema import BUILTIN_DATASETS, BUILTIN_MODELS

_HERE = Path(__file__).parent
DATA = _HERE / "data"

MODELS: Mapping[str, Path] = MappingProxyType({name: _HERE / "models" / name for name in BUILTIN_MODELS})
ADAPTED: Mapping[str, str] = MappingProxyType({"tiny-llama-orders": "tiny-llama"})
"""Models that are another one with an adapter added to its weights, and the name of that one."""
DATASETS: Mapping[str, Path] = MappingProxyType({name: DATA / name for name in BUILTIN_DATASETS})


def model_path(name: str) -> Path:
    """The folder of `builtin://<name>`: as `from_pretrained` reads it, or with the adapter of an `ADAPTED` model.

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
