"""Tokens that a recipe adds to the model's vocabulary: initializers and trainers give them the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blueprints.errors import UsageError


def add_tokens(tokenizer: Any, added: Sequence[str]) -> None:
    """Add `added` to a Transformers tokenizer, in their order after all others.

    They are ordinary tokens: decoded text shows them, also without special tokens.

    Raises:
        UsageError: one is in the vocabulary already: adding it would do nothing.
    """
    if not added:
        return
    known = tokenizer.get_vocab()
    there = [token for token in added if token in known]
    if there:
        raise UsageError(
            f"the tokenizer has them already: {', '.join(there)}", where="model.added_tokens", todo="leave these out"
        )
    tokenizer.add_tokens(list(added))
