"""sha256 of files and of data, as the manifests of the workspace state them: made and checked by different steps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""Files of a model directory that decide how text becomes tokens."""


def digest(data: object) -> str:
    """sha256 of `data` as canonical JSON, as 64 hex digits."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file's content, as 64 hex digits; read in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_digest(model: Path) -> str:
    """sha256 over the tokenizer's files in a model directory: rows and model belong together if it is equal."""
    return digest({name: hash_file(model / name) for name in TOKENIZER_FILES if (model / name).is_file()})
