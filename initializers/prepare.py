"""From raw rows to sequences ready for the method: checked, rendered, tokenised, masked, packed; in constant memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blueprints.errors import DataError, Fault, UsageError
from blueprints.recipe.schema import DatasetConfig, Recipe
from initializers.cards import card_splits
from initializers.containers import Row, read_rows, recognise
from initializers.formats import Example, Format, Reporter, described, detect, question, rename, type_name
from initializers.shards import ShardWriter
from initializers.splits import choose, data_files
from initializers.tokens import ChatTokenizer, Notes, Refused, Rendered, Tokens

DETECT_ROWS = 100
BATCH_ROWS = 512
BATCH_CHARACTERS = 2 << 20
PROVED_ROWS = 32
"""Rows of each split whose tokens are compared with Transformers' own and decoded back to text."""

OnRows = Callable[[str, int], None]


@dataclass
class Faults:
    """Faults of all rows: counted without end, kept up to a limit."""

    limit: int
    listed: list[Fault] = field(default_factory=list)
    total: int = 0

    def add(self, faults: Iterable[Fault]) -> None:
        """Count and, below the limit, keep."""
        for fault in faults:
            self.total += 1
            if len(self.listed) < self.limit:
                self.listed.append(fault)


@dataclass
class SplitReport:
    """What became of one split."""

    rows: int = 0
    """Rows that are in the result."""
    truncated: int = 0
    dropped: int = 0
    longest: int = 0
    """Tokens of the longest row, before truncation; of plain text far beyond the limit, those that were made."""
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As the manifest holds it."""
        return asdict(self)


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
    notes = [f"files: {len(train)} to train, {len(held_out)} held out; {', '.join(containers)}", *notes]
    return Plan(train, held_out, None if held_out else size, chosen, reason, tuple(notes), _schema(values))


def _blind(recipe: Recipe) -> Format:
    from initializers.formats import FORMATS, formats_of

    names = formats_of(recipe.method)
    return FORMATS[recipe.dataset.format if recipe.dataset.format in names else names[0]]


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

    Raises:
        UsageError: the format cannot be prepared.
    """

    def __init__(self, recipe: Recipe, format: Format, tokenizer: ChatTokenizer | None, on_rows: OnRows) -> None:
        self.recipe, self.format, self.tokenizer, self.on_rows = recipe, format, tokenizer, on_rows
        if format.read is None:
            raise UsageError(f"rows of the format {format.name} cannot be prepared", where="dataset.format")
        self._read = format.read
        self.faults = Faults(recipe.dataset.max_faults)
        self.max_length = recipe.training.max_length
        self.checked = 0
        self._proved = 0

    def split(self, name: str, rows: Iterable[Row | Fault], writer: ShardWriter | None) -> SplitReport:
        """Prepare one split; faults go to `self.faults`.

        Args:
            name: the split's name.
            rows: its rows.
            writer: takes the sequences; None: they are counted and thrown away.
        """
        report, seen, self._proved = SplitReport(), 0, 0
        for batch in _batched(self._examples(rows)):
            seen += len(batch)
            self.on_rows(name, seen)
            if self.tokenizer is None:
                report.rows += len(batch)
            else:
                self._batch(batch, self.tokenizer, writer, report)
        if not seen and not self.faults.total:
            self.faults.add([Fault(f"split {name!r}", "", "there are no rows", "at least one row")])
        return report

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
            if report.faults or example is None:
                self.faults.add(report.faults)
            else:
                yield item.where, example

    def _batch(
        self,
        batch: list[tuple[str, Example]],
        tokenizer: ChatTokenizer,
        writer: ShardWriter | None,
        report: SplitReport,
    ) -> None:
        rendered: list[tuple[int, Rendered]] = []
        for index, (where, example) in enumerate(batch):
            try:
                rendered += [(index, self._cut(item, tokenizer)) for item in tokenizer.render(example)]
            except Refused as refused:
                self.faults.add([Fault(where, self._field, refused.problem, hint=refused.hint)])
        sequences = tokenizer.encode([item for _, item in rendered])
        kept: set[int] = set()
        for (index, item), sequence in zip(rendered, sequences, strict=True):
            where = batch[index][0]
            if self._proved < PROVED_ROWS:
                self._proved += 1
                tokenizer.prove(item, sequence)
            fitted = self._fit(where, item, sequence, report)
            if fitted is None:
                continue
            kept.add(index)
            if writer is not None and not self.faults.total:
                if writer.asks:
                    self._ask(batch[index][1], item, fitted, tokenizer)
                writer.add(fitted)
        report.rows += len(kept)

    def _ask(self, example: Example, item: Rendered, sequence: Tokens, tokenizer: ChatTokenizer) -> None:
        """Note on a held-out row what it asks and where its answer begins."""
        if item.whole:
            return
        sequence.prompt = question(item.chat or example)
        marked = sequence
        if not tokenizer.completion_only:
            # Everything carries loss, so the mask does not tell prompt and answer apart: one for answers alone does.
            answers = replace(tokenizer, completion_only=True, notes=Notes())
            try:
                marked = answers.encode(answers.render(example)[-1:])[0]
            except Refused:
                return
        sequence.prompt_length = min(marked.answer_start(), len(sequence.ids))

    def _cut(self, item: Rendered, tokenizer: ChatTokenizer) -> Rendered:
        """Plain text far beyond the limit is cut before tokenising: what is cut could not reach into the limit."""
        limit = (self.max_length + 16) * max(16, tokenizer.longest_token)
        if not item.whole or len(item.text) <= limit:
            return item
        return Rendered(item.text[:limit], ((0, limit),), plain=True, whole=True)

    def _fit(self, where: str, item: Rendered, sequence: Tokens, report: SplitReport) -> Tokens | None:
        """Apply `dataset.overlong`; None if the row is dropped or faulty."""
        length = len(sequence.ids)
        report.longest = max(report.longest, length)
        if not sequence.mask.any():
            self.faults.add(
                [Fault(where, self._field, "no token of the row would be trained", "an answer that has tokens")]
            )
            return None
        if length <= self.max_length:
            return sequence
        overlong = "truncate" if item.whole else self.recipe.dataset.overlong
        if overlong == "drop":
            report.dropped += 1
            return None
        if overlong == "error":
            self.faults.add([self._overlong(where, length)])
            return None
        cut = replace(sequence, ids=sequence.ids[: self.max_length], mask=sequence.mask[: self.max_length])
        if not cut.mask.any():
            first = int(np.flatnonzero(sequence.mask)[0])
            self.faults.add([self._no_answer(where, first)])
            return None
        report.truncated += 1
        return cut

    def _overlong(self, where: str, length: int) -> Fault:
        return Fault(
            where,
            self._field,
            f"the row has {length} tokens, so its answer would be cut",
            f"at most {self.max_length} (training.max_length)",
            "Raise training.max_length, or set dataset.overlong to drop or truncate",
        )

    def _no_answer(self, where: str, first: int) -> Fault:
        return Fault(
            where,
            self._field,
            f"no token of the row would be trained: its answer begins after {first} tokens",
            f"at most {self.max_length - 1} before it (training.max_length={self.max_length})",
            "Raise training.max_length, or set dataset.overlong=drop",
        )

    @property
    def _field(self) -> str:
        return self.format.required[-1]


def _batched(examples: Iterator[tuple[str, Example]]) -> Iterator[list[tuple[str, Example]]]:
    """Batches bounded in rows and in characters."""
    batch: list[tuple[str, Example]] = []
    characters = 0
    for item in examples:
        batch.append(item)
        characters += _size(item[1])
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _size(example: Example) -> int:
    from initializers.formats import Chat, Instruction, Pair

    if isinstance(example, Chat):
        return sum(len(message["content"]) for message in example.messages)
    if isinstance(example, Pair):
        return len(example.prompt) + len(example.completion)
    if isinstance(example, Instruction):
        return len(example.instruction) + len(example.input) + len(example.output)
    return len(example.text)


def write_splits(
    directory: Path, plan: Plan, recipe: Recipe, preparer: Preparer, *, packing: bool
) -> dict[str, SplitReport]:
    """Write `directory/<split>/shard-NNNNN.arrow` for every split that there is.

    Raises:
        UsageError: `dataset.test_size` leaves no row to train on.
        DataError: every row was dropped.
    """
    reports: dict[str, SplitReport] = {}
    for name, rows in split_rows(plan, recipe, held_out(plan, recipe)).items():
        capacity = recipe.training.max_length if packing and name == "train" else None
        with ShardWriter(directory / name, capacity, asks=name == "eval") as writer:
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
