"""From checked rows to sequences of tokens, for each kind of method; what is too long or cannot be exact is a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from blueprints.errors import Fault, UsageError
from blueprints.recipe.rows import Kind, row_options, samples
from blueprints.recipe.schema import Recipe
from initializers.messages import Chat, Example, Message, Preference, Prompt, answer, question
from initializers.tokens import ChatTokenizer, Notes, Refused, Rendered, Tokens

PROVED_ROWS = 32
"""Sequences of each split whose tokens are compared with Transformers' own and decoded back to text."""
Batch = Sequence[tuple[str, Example]]
"""Rows with their places."""
Made = Iterator[tuple[int, dict[str, Any]]]
"""Sequences with the index of their row in the batch, as `ShardWriter` takes them."""


@dataclass
class Faults:
    """Faults of all rows: counted without end, kept up to a limit."""

    limit: int
    listed: list[Fault] = field(default_factory=list)
    total: int = 0

    def add(self, faults: Sequence[Fault]) -> None:
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
    duplicates: int = 0
    """Valid rows beyond the first of their kind."""
    leaked: int | None = None
    """Held-out rows that are in the training split too; None: this is the training split."""
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As the manifest holds it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class Maker(Protocol):
    """Makes one kind of sequences."""

    def make(self, batch: Batch, report: SplitReport) -> Made:
        """The sequences of a batch of rows. Their faults are added to the list the maker was made with."""


def maker_of(
    kind: Kind, recipe: Recipe, tokenizer: ChatTokenizer, faults: Faults, column: str, *, held_out: bool
) -> Maker:
    """What makes the sequences of one split.

    Args:
        kind: what the rows become.
        recipe: the resolved recipe.
        tokenizer: the model's.
        faults: gets the rows' faults.
        column: the column that a fault of a whole row is reported at.
        held_out: the split is for evaluation.

    Raises:
        UsageError: answers as long as the recipe allows do not fit into the model's context.
    """
    fit = _Fit(recipe, tokenizer, faults, column)
    if kind == "preference":
        return _Preferences(fit, held_out=held_out)
    if kind == "prompt":
        return _Prompts(fit)
    return _Supervised(fit, held_out=held_out)


class _Fit:
    """What the makers share: the tokenizer, the limits of the recipe, and the list of faults."""

    def __init__(self, recipe: Recipe, tokenizer: ChatTokenizer, faults: Faults, column: str) -> None:
        self.recipe, self.tokenizer, self.faults, self.column = recipe, tokenizer, faults, column
        self.max_length = recipe.training.max_length
        self.overlong = recipe.dataset.overlong
        self.answer = int(row_options(recipe).get("max_completion_length", 0))
        self.room = (
            None if not self.answer or tokenizer.model_context is None else tokenizer.model_context - self.answer
        )
        if self.room is not None and self.room <= 0:
            raise UsageError(
                f"answers of {self.answer} tokens leave no room for a prompt: the model sees "
                f"{tokenizer.model_context} tokens at once",
                where=f"{recipe.method}.max_completion_length",
                todo="set it lower, or use a model with more context",
            )
        self._proved = 0

    def prove(self, item: Rendered, sequence: Tokens) -> None:
        """Check the first sequences against Transformers' own."""
        if self._proved < PROVED_ROWS:
            self._proved += 1
            self.tokenizer.prove(item, sequence)

    def fault(self, where: str, problem: str, expected: str = "", hint: str = "") -> None:
        """Report a row as a whole."""
        self.faults.add([Fault(where, self.column, problem, expected, hint)])

    def refused(self, where: str, refused: Refused) -> None:
        """Report a row that cannot be rendered."""
        self.fault(where, refused.problem, hint=refused.hint)

    def too_long(self, where: str, what: str, length: int, limit: int, report: SplitReport) -> bool:
        """Whether a row may be cut: if not, it has been dropped or reported as `dataset.overlong` says."""
        if self.overlong == "drop":
            report.dropped += 1
        elif self.overlong == "error":
            context = limit < self.max_length
            self.fault(
                where,
                f"{what} {length} tokens"
                + ("" if context else ", so its answer would be cut" if not self.answer else ""),
                f"at most {limit} (the model's context of {self.tokenizer.model_context}, less {self.recipe.method}."
                f"max_completion_length={self.answer})"
                if context
                else f"at most {limit} (training.max_length)",
                f"{'Lower the latter' if context else 'Raise training.max_length'}, or set dataset.overlong to drop or "
                "truncate",
            )
        return self.overlong == "truncate"

    def no_answer(self, where: str, first: int) -> None:
        """Report a row of which the limit leaves no answer."""
        self.fault(
            where,
            f"no token of the row would be trained: its answer begins after {first} tokens",
            f"at most {self.max_length - 1} before it (training.max_length={self.max_length})",
            "Raise training.max_length, or set dataset.overlong=drop",
        )


# --- supervised ------------------------------------------------------------------------------------


class _Supervised:
    """Sequences with a loss mask; for a distillation also prompts alone, which the student answers."""

    def __init__(self, fit: _Fit, *, held_out: bool) -> None:
        self.fit, self.tokenizer, self.held_out = fit, fit.tokenizer, held_out
        self.prompts = fit.recipe.method == "distill"
        self.samples = samples(fit.recipe)

    def make(self, batch: Batch, report: SplitReport) -> Made:
        rendered: list[tuple[int, Rendered]] = []
        for index, (where, example) in enumerate(batch):
            try:
                rendered += [(index, self._cut(item)) for item in self._render(example)]
            except Refused as refused:
                self.fit.refused(where, refused)
        sequences = self.tokenizer.encode([item for _, item in rendered])
        for (index, item), sequence in zip(rendered, sequences, strict=True):
            where, example = batch[index]
            self.fit.prove(item, sequence)
            fitted = (
                self._prompt(where, sequence, report) if item.opening else self._answer(where, item, sequence, report)
            )
            if fitted is None:
                continue
            if self.held_out or self.prompts:
                self._ask(example, item, fitted)
            if self.samples and not self._has_room(where, fitted, report):
                continue
            row = {"input_ids": fitted.ids, "completion_mask": fitted.mask}
            yield index, row | {"prompt": fitted.prompt, "prompt_length": fitted.prompt_length}

    def _render(self, example: Example) -> list[Rendered]:
        if isinstance(example, Prompt):
            return [self.tokenizer.render_prompt(example)]
        assert not isinstance(example, Preference)
        return self.tokenizer.render(example)

    def _cut(self, item: Rendered) -> Rendered:
        """Plain text far beyond the limit is cut before tokenising: what is cut could not reach into the limit."""
        limit = (self.fit.max_length + 16) * max(16, self.tokenizer.longest_token)
        if not item.whole or len(item.text) <= limit:
            return item
        return Rendered(item.text[:limit], ((0, limit),), plain=True, whole=True)

    def _answer(self, where: str, item: Rendered, sequence: Tokens, report: SplitReport) -> Tokens | None:
        """Apply `dataset.overlong`; None if the row is dropped or faulty."""
        length, limit = len(sequence.ids), self.fit.max_length
        report.longest = max(report.longest, length)
        if not sequence.mask.any():
            self.fit.fault(where, "no token of the row would be trained", "an answer that has tokens")
            return None
        if length <= limit:
            return sequence
        if not item.whole and not self.fit.too_long(where, "the row has", length, limit, report):
            return None
        cut = replace(sequence, ids=sequence.ids[:limit], mask=sequence.mask[:limit])
        if not cut.mask.any():
            self.fit.no_answer(where, int(np.flatnonzero(sequence.mask)[0]))
            return None
        report.truncated += 1
        return cut

    def _prompt(self, where: str, sequence: Tokens, report: SplitReport) -> Tokens | None:
        ids = _prompt_ids(self.fit, where, sequence, report)
        return None if ids is None else Tokens(ids, np.zeros(len(ids), np.int8))

    def _ask(self, example: Example, item: Rendered, sequence: Tokens) -> None:
        """Note on a row what it asks and where its answer begins."""
        if item.whole:
            return
        sequence.prompt = question(item.chat or example)
        if item.opening:
            sequence.prompt_length = len(sequence.ids)
            return
        marked = sequence
        if not self.tokenizer.completion_only:
            # Everything carries loss, so the mask does not tell prompt and answer apart: one for answers alone does.
            answers = replace(self.tokenizer, completion_only=True, notes=Notes())
            assert not isinstance(example, Prompt | Preference)
            try:
                marked = answers.encode(answers.render(example)[-1:])[0]
            except Refused:
                return
        sequence.prompt_length = min(marked.answer_start(), len(sequence.ids))

    def _has_room(self, where: str, sequence: Tokens, report: SplitReport) -> bool:
        """Whether the student can answer the row's prompt."""
        room = self.fit.room
        if room is None or sequence.prompt_length <= room:
            return True
        if self.fit.overlong == "drop":
            report.dropped += 1
        else:
            self.fit.too_long(where, "the prompt has", sequence.prompt_length, room, report)
        return False


# --- preferences -----------------------------------------------------------------------------------


class _Preferences:
    """A prompt and two answers: the tokens of both whole conversations, taken apart where the answers begin."""

    def __init__(self, fit: _Fit, *, held_out: bool) -> None:
        self.fit, self.tokenizer, self.held_out = fit, fit.tokenizer, held_out

    def make(self, batch: Batch, report: SplitReport) -> Made:
        rendered: list[tuple[int, tuple[Rendered, Rendered]]] = []
        for index, (where, example) in enumerate(batch):
            assert isinstance(example, Preference)
            try:
                rendered.append((index, self.tokenizer.render_preference(example)))
            except Refused as refused:
                self.fit.refused(where, refused)
        sequences = iter(self.tokenizer.encode([side for _, pair in rendered for side in pair]))
        for index, items in rendered:
            pair = next(sequences), next(sequences)
            for item, side in zip(items, pair, strict=True):
                self.fit.prove(item, side)
            row = self._row(batch[index][0], pair, report)
            if row is None:
                continue
            if self.held_out:
                example = batch[index][1]
                assert isinstance(example, Preference)
                texts = {"chosen": answer(example.chosen), "rejected": answer(example.rejected)}
                row |= {"prompt": question(example)} | texts
            yield index, row

    def _row(self, where: str, pair: tuple[Tokens, Tokens], report: SplitReport) -> dict[str, Any] | None:
        if not all(side.mask.any() for side in pair):
            self.fit.fault(where, "an answer has no tokens", "answers that have tokens")
            return None
        chosen, rejected = (side.ids for side in pair)
        first = min(int(np.flatnonzero(side.mask)[0]) for side in pair)
        # A token may reach from the prompt into one answer and not into the other: both take it, so that either
        # concatenation is what the tokenizer makes of that whole conversation.
        start = _common(chosen, rejected, first)
        self.tokenizer.notes.merged_boundaries += start < first
        if not start:
            self.fit.fault(where, "the prompt has no tokens of its own", "a prompt before the answers")
            return None
        longest, limit = max(len(chosen), len(rejected)), self.fit.max_length
        report.longest = max(report.longest, longest)
        if longest > limit:
            if not self.fit.too_long(where, "prompt and answer have", longest, limit, report):
                return None
            if start >= limit:
                self.fit.no_answer(where, start)
                return None
            report.truncated += 1
        row = {"prompt_ids": chosen[:start], "chosen_ids": chosen[start:limit], "rejected_ids": rejected[start:limit]}
        if np.array_equal(row["chosen_ids"], row["rejected_ids"]):
            self.fit.fault(where, f"the answers have the same first {limit - start} tokens" if longest > limit else
                           "the answers have the same tokens", "a difference that the model can see")  # fmt: skip
            return None
        return row


def _common(one: Any, other: Any, limit: int) -> int:
    """Length of the common beginning, at most `limit`."""
    different = np.flatnonzero(one[:limit] != other[:limit])
    return int(different[0]) if different.size else limit


# --- prompts ---------------------------------------------------------------------------------------


class _Prompts:
    """Prompts to answer, with all that rewards may look at."""

    def __init__(self, fit: _Fit) -> None:
        self.fit, self.tokenizer = fit, fit.tokenizer

    def make(self, batch: Batch, report: SplitReport) -> Made:
        rendered: list[tuple[int, Rendered]] = []
        for index, (where, example) in enumerate(batch):
            assert isinstance(example, Prompt)
            try:
                rendered.append((index, self.tokenizer.render_prompt(example)))
            except Refused as refused:
                self.fit.refused(where, refused)
        sequences = self.tokenizer.encode([item for _, item in rendered])
        for (index, item), sequence in zip(rendered, sequences, strict=True):
            where, example = batch[index]
            assert isinstance(example, Prompt)
            self.fit.prove(item, sequence)
            ids = _prompt_ids(self.fit, where, sequence, report)
            if ids is not None:
                yield (
                    index,
                    {
                        "prompt_ids": ids,
                        "prompt": question(example),
                        "messages": _json(_own_form(item, example)),
                        "columns": _json(example.columns),
                        "reference": example.reference,
                    },
                )


def _own_form(item: Rendered, example: Prompt) -> list[Message] | str:
    """The prompt in the form of its row, which rewards get it in: messages, or a text."""
    return item.chat.messages if item.chat and isinstance(example.asked, Chat) else question(example)


def _prompt_ids(fit: _Fit, where: str, sequence: Tokens, report: SplitReport) -> Any | None:
    """The tokens of a prompt, cut at its beginning where the recipe asks for it; None if dropped or faulty."""
    length = len(sequence.ids)
    report.longest = max(report.longest, length)
    if not length:
        fit.fault(where, "the prompt has no tokens", "a prompt that has tokens")
        return None
    limit = fit.max_length if fit.room is None else min(fit.max_length, fit.room)
    if length <= limit:
        return sequence.ids
    if not fit.too_long(where, "the prompt has", length, limit, report):
        return None
    report.truncated += 1
    return sequence.ids[-limit:]


def _json(value: Mapping[str, Any] | Sequence[Any] | str) -> str:
    """As JSON text; dates and decimals, which columns of Parquet may hold, as their text."""
    return json.dumps(value, ensure_ascii=False, default=str)
