"""From raw rows to sequences ready for the method: checked, rendered, tokenised, masked, packed; in constant memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blueprints.errors import DataError, Fault, UsageError
from blueprints.recipe.rows import formats_of, kind_of, row_options, samples, wants_answers
from blueprints.recipe.schema import DatasetConfig, Recipe
from initializers.cards import card_splits
from initializers.containers import Row, read_rows, recognise
from initializers.duplicates import Duplicates
from initializers.formats import FORMATS, Format, detect, rename
from initializers.messages import Example, Prompt, Reporter, described, size_of, type_name
from initializers.prompts import check_columns_needed, needed_columns
from initializers.sequences import Faults, Maker, SplitReport, maker_of
from initializers.shards import ShardWriter, columns_of
from initializers.splits import choose, data_files
from initializers.tokens import ChatTokenizer

DETECT_ROWS = 100
BATCH_ROWS = 512
BATCH_CHARACTERS = 2 << 20
TRAIN, EVAL = "train", "eval"
"""The splits of prepared rows."""

OnRows = Callable[[str, int], None]


@dataclass(frozen=True)
class Plan:
    """Which rows of which files are trained on and which are held out.

    Attributes:
        train: files of the training split by relative path.
        held_out: files of the held-out split; empty: rows of the training split, or none.
        eval_rows: which rows of the training split are held out, by index; None: none.
        format: the rows' format.
        reason: why it is that one.
        notes: lines for the log.
        schema: columns of the first rows and their types.
    """

    train: Mapping[str, Path]
    held_out: Mapping[str, Path]
    test_size: float | int | None
    format: Format
    reason: str
    notes: tuple[str, ...]
    schema: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in (*self.train.values(), *self.held_out.values()))


def make_plan(files: Mapping[str, Path], recipe: Recipe, *, single: bool) -> Plan:
    """Decide splits and format.

    Args:
        files: all files of the source by relative path.
        recipe: the resolved recipe.
        single: the user named one file.

    Raises:
        UsageError: the recipe asks for a split, a format or a column that is not there, or several formats fit.
        DataError: no file has rows, or the rows fit no format.
    """
    config = recipe.dataset
    size = _test_size(config)
    usable, from_card = data_files(files, single=single), None
    if not single and "README.md" in files:
        from_card = card_splits(files["README.md"], usable)
    train, held_out, notes = choose(usable, config, single=single, card=from_card)
    containers = sorted({str(recognise(path, name)) for name, path in (train | held_out).items()})
    first = [item for item in itertools.islice(read_all(train), DETECT_ROWS) if isinstance(item, Row)]
    values = [row.value for row in first]
    if not values:
        chosen, reason = _blind(recipe), "no row could be read"
    else:
        chosen, reason = detect(values, recipe.method, config.format, config.columns)
        _check_mapped(values, config)
    _check_format(recipe, chosen)
    notes = [f"files: {len(train)} to train, {len(held_out)} held out; {', '.join(containers)}", *notes]
    return Plan(train, held_out, None if held_out else size, chosen, reason, tuple(notes), _schema(values))


def _blind(recipe: Recipe) -> Format:
    names = formats_of(recipe.method)
    return FORMATS[recipe.dataset.format if recipe.dataset.format in names else names[0]]


def _check_format(recipe: Recipe, chosen: Format) -> None:
    """Refuse rows that lack what a distillation needs of them."""
    if recipe.distill is None:
        return
    if chosen.name == "prompt" and wants_answers(recipe):
        raise DataError(
            f"the rows have prompts and no answers, and with distill.lmbda={recipe.distill.lmbda:g} some batches are "
            "trained on answers",
            where="dataset.format",
            todo="use rows with answers, or set distill.lmbda=1: the student answers every prompt itself",
        )
    if chosen.name == "text" and samples(recipe):
        raise DataError(
            f"plain text has no prompts, and with distill.lmbda={recipe.distill.lmbda:g} the student answers prompts",
            where="dataset.format",
            todo="use rows with prompts, or set distill.lmbda=0: every batch is trained on the rows' text",
        )


def _check_mapped(values: list[Any], config: DatasetConfig) -> None:
    rows = [value for value in values if isinstance(value, dict)]
    for name, source in config.columns.items():
        if rows and not any(source in row for row in rows):
            raise UsageError(
                f"the rows have no column {source!r}; their columns: {', '.join(map(str, rows[0]))}",
                where=f"dataset.columns.{name}",
                todo="name one of them",
            )


def _schema(values: list[Any]) -> dict[str, str]:
    schema: dict[str, str] = {}
    for value in values:
        for key, item in value.items() if isinstance(value, dict) else ():
            if schema.get(key, "null") == "null":
                schema[str(key)] = type_name(item).removeprefix("a ").removeprefix("an ")
    return schema


def _test_size(config: DatasetConfig) -> float | int | None:
    size = config.test_size
    if size is None:
        return None
    if size < 0 or (size >= 1 and size != int(size)):
        raise UsageError(
            f"{size} is neither a share nor a number of rows",
            where="dataset.test_size",
            todo="write a share below 1 (0.1) or a number of rows (500)",
        )
    if config.eval_split is not None and size:
        raise UsageError(
            "dataset.eval_split and dataset.test_size are both set",
            where="dataset.test_size",
            todo="keep one: a split of the source, or rows held out of the training split",
        )
    return int(size) if size >= 1 else size


def read_all(files: Mapping[str, Path]) -> Iterator[Row | Fault]:
    """The rows of several files, one after the other, in the order of their names."""
    for relative, path in sorted(files.items()):
        yield from read_rows(path, relative)


# --- rows that are held out ------------------------------------------------------------------------


class HeldOut:
    """A deterministic choice of rows: the `count` of `rows` whose keyed hash is smallest.

    The hash is a bijection of the row's index, so that the choice is exact and its memory constant.

    Args:
        rows: rows to choose from.
        count: rows to choose.
        seed: key of the hash.
    """

    def __init__(self, rows: int, count: int, seed: int) -> None:
        self.seed = np.uint64(seed)
        self.threshold = self._threshold(rows, count) if count else None

    def __contains__(self, index: int) -> bool:
        if self.threshold is None:
            return False
        return bool(self._hash(np.asarray([index], np.uint64))[0] <= self.threshold)

    def _hash(self, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """SplitMix64's finaliser (Steele, Lea, Flood 2014) over index and seed."""
        with np.errstate(over="ignore"):
            x = index + (self.seed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return x ^ (x >> np.uint64(31))

    def _threshold(self, rows: int, count: int) -> np.uint64:
        """The count-th smallest hash, found 16 bits at a time."""
        prefix, rank = 0, count
        for shift in (48, 32, 16, 0):
            histogram = np.zeros(1 << 16, np.int64)
            for start in range(0, rows, 1 << 20):
                hashes = self._hash(np.arange(start, min(rows, start + (1 << 20)), dtype=np.uint64))
                if shift < 48:
                    hashes = hashes[hashes >> np.uint64(shift + 16) == np.uint64(prefix)]
                bins = (hashes >> np.uint64(shift)) & np.uint64(0xFFFF)
                histogram += np.bincount(bins.astype(np.int64), minlength=1 << 16)
            below = np.cumsum(histogram)
            digit = int(np.searchsorted(below, rank))
            rank -= int(below[digit - 1]) if digit else 0
            prefix = prefix << 16 | digit
        return np.uint64(prefix)


def held_out(plan: Plan, recipe: Recipe) -> HeldOut | None:
    """The rows of the training split that `dataset.test_size` holds out; None if none.

    Raises:
        UsageError: it would leave no row to train on.
    """
    if not plan.test_size:
        return None
    rows = sum(1 for _ in itertools.islice(read_all(plan.train), recipe.dataset.max_rows))
    count = plan.test_size if isinstance(plan.test_size, int) else max(1, round(plan.test_size * rows))
    if count >= rows and rows:
        raise UsageError(
            f"holding out {count} of {rows} rows leaves none to train on",
            where="dataset.test_size",
            todo="hold out fewer rows",
        )
    seed = recipe.training.data_seed
    return HeldOut(rows, min(count, rows), recipe.training.seed if seed is None else seed)


def split_rows(plan: Plan, recipe: Recipe, chosen: HeldOut | None) -> dict[str, Callable[[], Iterator[Row | Fault]]]:
    """A reader of each split that there is."""

    def train() -> Iterator[Row | Fault]:
        rows = itertools.islice(read_all(plan.train), recipe.dataset.max_rows)
        return (row for index, row in enumerate(rows) if chosen is None or index not in chosen)

    def taken_out() -> Iterator[Row | Fault]:
        rows = itertools.islice(read_all(plan.train), recipe.dataset.max_rows)
        return (row for index, row in enumerate(rows) if chosen is not None and index in chosen)

    if plan.held_out:
        return {"train": train, "eval": lambda: read_all(plan.held_out)}
    return {"train": train} if chosen is None else {"train": train, "eval": taken_out}


# --- rows to sequences -------------------------------------------------------------------------------


class Preparer:
    """Turns the rows of splits into sequences.

    Args:
        recipe: the resolved recipe.
        format: the rows' format.
        tokenizer: the model's; None: rows are only checked.
        on_rows: called with the split and the number of rows done.
        seen: remembers rows, to count those that occur twice.
    """

    def __init__(
        self, recipe: Recipe, format: Format, tokenizer: ChatTokenizer | None, on_rows: OnRows, seen: Duplicates
    ) -> None:
        self.recipe, self.format, self.tokenizer, self.on_rows, self.seen = recipe, format, tokenizer, on_rows, seen
        self.kind = kind_of(recipe.method, format.name)
        self._read = format.reader(self.kind)
        self._needed = needed_columns(recipe)
        self.faults = Faults(recipe.dataset.max_faults)
        self.checked = 0

    def split(self, name: str, rows: Iterable[Row | Fault], writer: ShardWriter | None) -> SplitReport:
        """Prepare one split; faults go to `self.faults`.

        Args:
            name: the split's name.
            rows: its rows.
            writer: takes the sequences; None: they are counted and thrown away.
        """
        report, seen, maker = SplitReport(), 0, None
        if self.tokenizer is not None:
            # What is wrong with a row as a whole is its answer's length or mask, or the prompt where that is all.
            column = self.format.required[0 if self.kind == "prompt" else -1]
            maker = maker_of(self.kind, self.recipe, self.tokenizer, self.faults, column, held_out=name == EVAL)
        for batch in _batched(self._examples(rows)):
            seen += len(batch)
            self.on_rows(name, seen)
            self.seen.add(name, [example for _, example in batch])
            if maker is None:
                report.rows += len(batch)
            else:
                report.rows += self._make(maker, batch, writer, report)
        if not seen and not self.faults.total:
            self.faults.add([Fault(f"split {name!r}", "", "there are no rows", "at least one row")])
        report.duplicates = self.seen.repeated(name)
        if name == EVAL:
            report.leaked = self.seen.shared(EVAL, TRAIN)
        return report

    def _make(
        self, maker: Maker, batch: list[tuple[str, Example]], writer: ShardWriter | None, report: SplitReport
    ) -> int:
        """Make a batch's sequences; the number of rows that are in the result."""
        kept: set[int] = set()
        for index, sequence in maker.make(batch, report):
            kept.add(index)
            if writer is not None and not self.faults.total:
                writer.add(sequence)
        return len(kept)

    def _examples(self, rows: Iterable[Row | Fault]) -> Iterator[tuple[str, Example]]:
        for item in rows:
            self.checked += 1
            if isinstance(item, Fault):
                self.faults.add([item])
                continue
            report = Reporter(item.where)
            if not isinstance(item.value, dict):
                report("", described(item.value), "an object with named columns")
                example = None
            else:
                example = self._read(rename(item.value, self.recipe.dataset.columns), report)
                if isinstance(example, Prompt):
                    check_columns_needed(example, self._needed, report)
            if report.faults or example is None:
                self.faults.add(report.faults)
            else:
                yield item.where, example


def _batched(examples: Iterator[tuple[str, Example]]) -> Iterator[list[tuple[str, Example]]]:
    """Batches bounded in rows and in characters."""
    batch: list[tuple[str, Example]] = []
    characters = 0
    for item in examples:
        batch.append(item)
        characters += size_of(item[1])
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_splits(directory: Path, plan: Plan, recipe: Recipe, preparer: Preparer) -> dict[str, SplitReport]:
    """Write `directory/<split>/shard-NNNNN.arrow` for every split that there is.

    Raises:
        UsageError: `dataset.test_size` leaves no row to train on.
        DataError: every row was dropped.
    """
    reports: dict[str, SplitReport] = {}
    packing = bool(row_options(recipe)["packing"])
    for name, rows in split_rows(plan, recipe, held_out(plan, recipe)).items():
        packed = packing and name == TRAIN and preparer.kind == "supervised"
        columns = columns_of(preparer.kind, held_out=name == EVAL, packed=packed, prompts=recipe.method == "distill")
        with ShardWriter(directory / name, columns, recipe.training.max_length if packed else None) as writer:
            report = preparer.split(name, rows(), writer)
        report.sequences, report.tokens = writer.sequences, writer.tokens
        report.trained_tokens, report.shards = writer.trained_tokens, writer.shards
        if not report.sequences and not preparer.faults.total:
            raise DataError(
                f"all {report.dropped} rows of the split {name} are longer than training.max_length="
                f"{recipe.training.max_length} and were dropped",
                where="dataset.overlong",
                todo=f"raise training.max_length (the longest row has {report.longest} tokens)",
            )
        reports[name] = report
    return reports
