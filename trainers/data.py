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
from blueprints.recipe.rows import Kind, kind_of, row_options
from blueprints.recipe.schema import Recipe
from trainers.process import world

IGNORED = -100
"""Label of a token that carries no loss, as PyTorch's cross-entropy has it."""
PREPARE_AGAIN = "run the dataset initializer again with this recipe and this model"


@dataclass(frozen=True)
class PreparedData:
    """Rows ready for training.

    Attributes:
        train: memory-mapped rows. Kind `supervised`: `input_ids`, `completion_mask`, packed `seq_lengths`, of a
            distillation `prompt_length`; `preference`: `prompt_ids`, `chosen_ids`, `rejected_ids`; `prompt`:
            `prompt_ids`, `prompt`, `messages`, `columns`, `reference`.
        eval: held-out rows, never packed, with their texts; None without an evaluation split.
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

    @property
    def kind(self) -> Kind:
        """What the rows became."""
        found: Kind = self.prepared["kind"]
        return found

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
            shape, a row has no trained token, no prompt or an empty answer, or a token is beyond the vocabulary.
    """
    disable_progress_bars()
    manifest = read_manifest(directory)
    prepared = manifest.get("prepared")
    if not isinstance(prepared, dict):
        raise DataError("the data set is fetched but not prepared", where=str(directory), todo=PREPARE_AGAIN)
    _check_settings(prepared, recipe, directory)
    _check_tokenizer(prepared, directory.parent / "model", directory)
    splits, kind = prepared["splits"], prepared["kind"]
    train = _open_split(directory / "prepared" / "train", splits["train"], kind, vocab_size)
    has_eval = "eval" in splits and splits["eval"].get("rows", 0) > 0
    held_out = _open_split(directory / "prepared" / "eval", splits["eval"], kind, vocab_size) if has_eval else None
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
    asked = {
        "kind": kind_of(recipe.method, str(prepared.get("format"))),
        "method": recipe.method,
        "max_length": recipe.training.max_length,
        "added_tokens": recipe.model.added_tokens or None,
        **row_options(recipe),
    }
    for key, value in asked.items():
        if prepared.get(key) != value:
            raise DataError(
                f"the rows were prepared with {key}={prepared.get(key)!r}, the recipe says {value!r}",
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


def _open_split(directory: Path, counts: Mapping[str, Any], kind: Kind, vocab_size: int) -> Dataset:
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
    _check_rows(rows, directory, kind, vocab_size)
    return rows


TOKEN_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "supervised": ("input_ids",),
    "preference": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "prompt": ("prompt_ids",),
}
"""The columns of each kind that hold tokens; none may be empty."""


def _check_rows(rows: Dataset, directory: Path, kind: Kind, vocab_size: int) -> None:
    """Every row has its tokens, trains at least one, and no token is beyond the model's vocabulary."""
    table: pa.Table = rows.data.table
    missing = [name for name in TOKEN_COLUMNS[kind] if name not in table.column_names]
    if missing:
        raise DataError(f"the shards have no {', '.join(missing)}", where=str(directory), todo=PREPARE_AGAIN)
    start = 0
    for batch in table.to_batches(max_chunksize=8192):
        for name in TOKEN_COLUMNS[kind]:
            _check_tokens(batch.column(name), name, start, directory, vocab_size)
        if kind == "supervised":
            _check_mask(batch, start, directory)
        start += batch.num_rows


def _check_tokens(ids: pa.ListArray, name: str, start: int, directory: Path, vocab_size: int) -> None:
    largest = pc.max(ids.flatten()).as_py()
    if largest is not None and largest >= vocab_size:
        raise DataError(
            f"token {largest} is beyond the model's vocabulary of {vocab_size}",
            where=str(directory),
            todo=f"the rows were tokenised for another model: {PREPARE_AGAIN}",
        )
    empty = pc.index(pc.list_value_length(ids), 0).as_py()
    if empty >= 0:
        raise DataError(f"row {start + empty} has no {name}", where=str(directory), todo=PREPARE_AGAIN)


def _check_mask(batch: pa.RecordBatch, start: int, directory: Path) -> None:
    """Some token of every row carries loss; of a distillation, a row may be a prompt that the student answers."""
    mask = batch.column("completion_mask")
    trained = pc.list_parent_indices(mask).filter(pc.greater(mask.flatten(), 0))
    if pc.count_distinct(trained).as_py() == batch.num_rows:
        return
    seen = set(trained.to_pylist())
    without = [index for index in range(batch.num_rows) if index not in seen]
    if "prompt_length" in batch.schema.names:
        lengths, prompts = pc.list_value_length(mask), batch.column("prompt_length")
        without = [index for index in without if lengths[index].as_py() != prompts[index].as_py()]
    if without:
        problem = f"row {start + without[0]} has no token that carries loss"
        raise DataError(problem, where=str(directory), todo=PREPARE_AGAIN)


HANDED_ON = ("seq_lengths", "prompt", "prompt_length", "top_ids", "top_log_probs", "rest")
"""Columns of rows that a batch keeps as they are; the last three are a teacher's stored scores."""


def with_labels(rows: Dataset) -> Dataset:
    """`rows` as TRL's collator wants them: `labels` made from `completion_mask` when a batch is read, never copied."""

    def label(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        labels = [
            [token if trained else IGNORED for token, trained in zip(ids, mask, strict=True)]
            for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)
        ]
        ready = {"input_ids": batch["input_ids"], "labels": labels}
        return ready | {name: batch[name] for name in HANDED_ON if name in batch}

    # Renamed because TRL refuses a `completion_mask` without a `labels` column, and a transform has no columns.
    return rows.rename_column("completion_mask", "loss_mask").with_transform(label)


def first_ids(data: PreparedData, count: int) -> list[list[int]]:
    """Token ids of the first `count` held-out rows; of training rows where none are held out.

    Of a preference prompt and better answer, of a prompt the prompt alone.
    """
    rows = data.eval if data.eval is not None else data.train
    names = [name for name in TOKEN_COLUMNS[data.kind] if name != "rejected_ids"]
    return [[token for name in names for token in row[name]] for row in rows.select(range(min(len(rows), count)))]
