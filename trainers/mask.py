"""The mask proof: some rows as text, with the tokens that carry loss marked, before the first step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from blueprints.errors import DataError

OPEN, CLOSE = "⟦", "⟧"
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
LONGEST = 1200
"""Characters of a row that are printed."""


def mask_proof(rows: Any, tokenizer: PreTrainedTokenizerBase, count: int = 3) -> dict[str, Any]:
    """Render `count` rows spread over the split, with trained stretches between ⟦ and ⟧.

    Args:
        rows: rows with `input_ids`, `labels` (-100: not trained) and, when packed, `seq_lengths`.
        tokenizer: what made the tokens.

    Returns:
        `{"rows": [{"row", "text", "tokens", "trained_tokens"}]}`, as it goes into `run.json`.

    Raises:
        DataError: a row has no trained token, or trains all of its answer but leaves nothing readable.
    """
    shown = []
    for index in _spread(len(rows), count):
        row = rows[index]
        length = row["seq_lengths"][0] if row.get("seq_lengths") else len(row["input_ids"])
        ids, labels = row["input_ids"][:length], row["labels"][:length]
        trained = sum(label >= 0 for label in labels)
        if not trained:
            raise DataError(
                f"row {index} has no token that carries loss", where="prepared/train",
                todo="check dataset.format and dataset.columns, and run the dataset initializer again",
            )  # fmt: skip
        text = marked(ids, labels, tokenizer)
        shown.append({"row": index, "text": text, "tokens": len(ids), "trained_tokens": trained})
    return {"rows": shown}


def pair_proof(rows: Any, tokenizer: PreTrainedTokenizerBase, *, both: bool = True, count: int = 2) -> dict[str, Any]:
    """Render `count` preferences spread over the split, each answer after its prompt.

    Args:
        rows: rows with `prompt_ids`, `chosen_ids` and `rejected_ids`.
        both: whether the rejected answer carries loss too.

    Returns:
        as `mask_proof`; each entry says in `answer` which of the two it is.
    """
    shown = []
    for index in _spread(len(rows), count):
        row = rows[index]
        for answer in ("chosen", "rejected"):
            prompt, ids = list(row["prompt_ids"]), list(row[f"{answer}_ids"])
            trained = answer == "chosen" or both
            text = marked(prompt + ids, [-1] * len(prompt) + [0 if trained else -1] * len(ids), tokenizer)
            entry = {"row": index, "answer": answer, "text": text, "tokens": len(prompt) + len(ids)}
            shown.append(entry | {"trained_tokens": len(ids) if trained else 0})
    return {"rows": shown}


def heading(row: dict[str, Any]) -> str:
    """What an entry of a mask proof shows, in a few words."""
    which = f"row {row['row']}, {row['answer']}" if "answer" in row else f"row {row['row']}"
    return f"{which}: {row['trained_tokens']} of {row['tokens']} tokens trained"


def marked(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of `ids` with the trained stretches between ⟦ and ⟧."""
    parts: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (labels[end] >= 0) != (labels[start] >= 0):
            text = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            parts.append(f"{OPEN}{text}{CLOSE}" if labels[start] >= 0 else text)
            start = end
    return "".join(parts)


def for_terminal(proof: dict[str, Any]) -> str:
    """The proof as lines to print; at a terminal trained text is green too."""
    lines = [f"Mask proof: what carries loss stands between {OPEN} and {CLOSE}"]
    if "note" in proof:
        lines.append(f"  {proof['note']}")
    colour = sys.stdout.isatty()
    for row in proof["rows"]:
        text = row["text"] if len(row["text"]) <= LONGEST else row["text"][:LONGEST] + " …"
        if colour:
            text = text.replace(OPEN, GREEN + OPEN).replace(CLOSE, CLOSE + PLAIN)
        lines.append(f"  {heading(row)}")
        lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines) + (PLAIN if colour else "")


def _spread(total: int, count: int) -> list[int]:
    count = min(total, count)
    return [index * (total - 1) // max(1, count - 1) for index in range(count)]
