"""Whether a teacher and its student mean the same by every token: only then can their probabilities be compared."""

from __future__ import annotations

from pathlib import Path

from blueprints.digests import tokenizer_digest
from blueprints.errors import DataError
from initializers.tokens import load_tokenizer


def require_same_vocabulary(student: Path, teacher: Path, *, trust_remote_code: bool = False) -> None:
    """Compare the tokenizers of two model directories, token by token.

    The rows of their embeddings may differ: models of one family are padded to different sizes.

    Raises:
        DataError: the vocabularies differ; the message says where.
    """
    if tokenizer_digest(student) == tokenizer_digest(teacher):
        return
    ours, theirs = (_vocabulary(path, trust_remote_code=trust_remote_code) for path in (student, teacher))
    if ours == theirs:
        return
    raise DataError(
        f"teacher and student have different vocabularies: {_difference(ours, theirs)}",
        where="distill.teacher",
        todo="their probabilities are compared token by token: choose a teacher of the student's family; or let it write "
        "the answers of a data set and train on these with the method sft",
    )


def _vocabulary(model: Path, *, trust_remote_code: bool) -> dict[str, int]:
    loaded = load_tokenizer(model, chat_template=None, completion_only=True, trust_remote_code=trust_remote_code)
    found: dict[str, int] = loaded.tokenizer.get_vocab()
    return found


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """The sizes if they differ, and the first token that does."""
    parts = []
    if len(ours) != len(theirs):
        parts.append(f"the teacher has {len(theirs):,} tokens, the student {len(ours):,}")
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != index:
            other = f"has the number {theirs[token]}" if token in theirs else "does not exist"
            return "; ".join([*parts, f"the student's token {token!r} (number {index}) {other} in the teacher's"])
    extra = min(theirs.keys() - ours.keys(), key=theirs.__getitem__)
    return "; ".join(
        [*parts, f"the teacher's token {extra!r} (number {theirs[extra]}) does not exist in the student's"]
    )
