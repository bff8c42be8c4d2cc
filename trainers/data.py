"""The prepared rows: Arrow shards that every rank memory-maps, checked against the recipe and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets, disable_progress_bars

from blueprints.digests import hash_file, tokenizer_digest
from blueprints.errors import DataError
from blueprints.recipe.schema import Recipe
from trainers.process import world

IGNORED = -100
"""Label of a token that carries no loss, as PyTorch's cross-entropy has it."""
PREPARE_AGAIN = "run the dataset initializer again with this recipe and this model"


@dataclass(frozen=True)
class PreparedData:
    """Rows ready for training.

    Attributes:
        train: rows with `input_ids`, `completion_mask` and, when packed, `seq_lengths`; memory-mapped.
        eval: held-out rows, never packed; None without an evaluation split.
        prepared: the manifest's `prepared` entry: fingerprint, counts, settings the rows were made with.
        manifest: the whole manifest of the data set.
    """

    train: Dataset
    eval: Dataset | None
    prepared: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def packed(self) -> bool:
        return "seq_lengths" in self.train.column_names

    def counts(self, split: str) -> dict[str, Any]:
        """Rows, sequences, tokens, trained tokens, truncated and dropped rows of a split."""
        found: dict[str, Any] = self.prepared["splits"][split]
        return found


def open_prepared(directory: Path, recipe: Recipe, vocab_size: int) -> PreparedData:
    """Map the shards of `directory`/prepared into memory.

    Args:
        directory: the workspace's `dataset`.
        recipe: the resolved recipe; the rows must have been prepared with its settings.
        vocab_size: rows of the model's embedding; no token may be beyond.

    Raises:
        DataError: nothing is prepared, it was prepared for other settings, a shard is missing, cut or of another
            shape, or a row has no trained token.
    """
    disable_progress_bars()
    manifest = read_manifest(directory)
    prepared = manifest.get("prepared")
    if not isinstance(prepared, dict):
        raise DataError("the data set is fetched but not prepared", where=str(directory), todo=PREPARE_AGAIN)
    _check_settings(prepared, recipe, directory)
    _check_tokenizer(prepared, directory.parent / "model", directory)
    splits = prepared["splits"]
    train = _open_split(directory / "prepared" / "train", splits["train"], vocab_size)
    has_eval = "eval" in splits and splits["eval"].get("rows", 0) > 0
    held_out = _open_split(directory / "prepared" / "eval", splits["eval"], vocab_size) if has_eval else None
    return PreparedData(train, held_out, prepared, manifest)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The `_manifest.json` of a workspace directory.

    Raises:
        DataError: it is missing or is not JSON.
    """
    path = directory / "_manifest.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            "there is nothing to train with: no _manifest.json", where=str(directory), todo="run the initializers first"
        ) from None
    except ValueError as error:
        raise DataError(f"the manifest is not JSON: {error}", where=str(path), todo=PREPARE_AGAIN) from None
    return data


def _check_settings(prepared: Mapping[str, Any], recipe: Recipe, directory: Path) -> None:
    """The rows must have been made with the settings the recipe now asks for."""
    options = recipe.sft
    asked = {
        "method": recipe.method,
        "max_length": recipe.training.max_length,
        "packing": options.packing if options else False,
        "completion_only_loss": options.completion_only_loss if options else None,
    }
    for key, value in asked.items():
        if key in prepared and prepared[key] != value:
            raise DataError(
                f"the rows were prepared with {key}={prepared[key]!r}, the recipe says {value!r}",
                where=str(directory / "prepared"),
                todo=PREPARE_AGAIN,
            )


def _check_tokenizer(prepared: Mapping[str, Any], model: Path, directory: Path) -> None:
    """The rows must have been made with the tokenizer that lies in the workspace now."""
    stated = prepared.get("tokenizer_sha256")
    if stated is not None and stated != tokenizer_digest(model):
        raise DataError(
            "the rows were tokenised with another tokenizer than the model's",
            where=str(directory / "prepared"),
            todo=PREPARE_AGAIN,
        )


def _check_shard(path: Path, stated: Mapping[str, Any], *, content: bool) -> None:
    """A shard is the file the manifest speaks of; `content`: its sha256 too."""
    size = path.stat().st_size
    if size != stated["size"]:
        raise DataError(
            f"the shard has {size} bytes, {stated['size']} were written", where=str(path), todo=PREPARE_AGAIN
        )
    if content and hash_file(path) != stated["sha256"]:
        raise DataError("the shard has changed since it was written", where=str(path), todo=PREPARE_AGAIN)


def _open_split(directory: Path, counts: Mapping[str, Any], vocab_size: int) -> Dataset:
    paths = sorted(directory.glob("shard-*.arrow"))
    expected = len(counts.get("shards", paths))
    if not paths or len(paths) != expected:
        raise DataError(f"{len(paths)} of {expected} shards are there", where=str(directory), todo=PREPARE_AGAIN)
    parts = []
    stated = {item["path"]: item for item in counts.get("shards", []) if isinstance(item, dict)}
    for path in paths:
        if path.name in stated:
            _check_shard(path, stated[path.name], content=world().main)
        try:
            parts.append(Dataset.from_file(str(path)))
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"the shard cannot be read: {error}", where=str(path), todo=PREPARE_AGAIN) from error
    rows: Dataset = concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    sequences = counts.get("sequences", counts.get("rows"))
    if sequences is not None and len(rows) != sequences:
        raise DataError(
            f"{len(rows)} sequences are there, the manifest says {sequences}", where=str(directory), todo=PREPARE_AGAIN
        )
    _check_rows(rows, directory, vocab_size)
    return rows


def _check_rows(rows: Dataset, directory: Path, vocab_size: int) -> None:
    """Every row trains at least one token, and no token is beyond the model's vocabulary."""
    table: pa.Table = rows.data.table
    start = 0
    for batch in table.to_batches(max_chunksize=8192):
        ids, mask = batch.column("input_ids"), batch.column("completion_mask")
        largest = pc.max(ids.flatten()).as_py()
        if largest is not None and largest >= vocab_size:
            raise DataError(
                f"token {largest} is beyond the model's vocabulary of {vocab_size}",
                where=str(directory),
                todo=f"the rows were tokenised for another model: {PREPARE_AGAIN}",
            )
        trained = pc.list_parent_indices(mask).filter(pc.greater(mask.flatten(), 0))
        if pc.count_distinct(trained).as_py() < batch.num_rows:
            seen = set(trained.to_pylist())
            row = start + next(index for index in range(batch.num_rows) if index not in seen)
            raise DataError(f"row {row} has no token that carries loss", where=str(directory), todo=PREPARE_AGAIN)
        start += batch.num_rows


def with_labels(rows: Dataset) -> Dataset:
    """`rows` as TRL's collator wants them: `labels` made from `completion_mask` when a batch is read, never copied."""

    def label(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        labels = [
            [token if trained else IGNORED for token, trained in zip(ids, mask, strict=True)]
            for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)
        ]
        ready = {"input_ids": batch["input_ids"], "labels": labels}
        return ready | {name: batch[name] for name in ("seq_lengths", "prompt", "prompt_length") if name in batch}

    # Renamed because TRL refuses a `completion_mask` without a `labels` column, and a transform has no columns.
    return rows.rename_column("completion_mask", "loss_mask").with_transform(label)


def first_ids(data: PreparedData, count: int) -> list[list[int]]:
    """Token ids of the first `count` held-out rows; of training rows where none are held out."""
    rows = data.eval if data.eval is not None else data.train
    return [list(row["input_ids"]) for row in rows.select(range(min(len(rows), count)))]
