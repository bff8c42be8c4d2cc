"""A workspace as the initializers leave it for a distillation: a tiny student, a tiny teacher, rows with prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import methods_kit
import pytest
from methods_kit import Row
from sft_workspace import raw_rows, save_model, tokenised

RECIPE = """
eval: {{metric: exact_match, max_new_tokens: 8, samples: 4}}
distill: {{teacher: "file:///teacher", lmbda: {lmbda}{sampled}}}
"""


def answers(tokenizer: Any, count: int, seed: int) -> list[Row]:
    """Prompts with answers, as the dataset initializer writes them."""
    rows = raw_rows(count, seed)
    return [
        {"input_ids": ids, "completion_mask": mask, "prompt_length": mask.index(1), "prompt": row["prompt"]}
        for row, (ids, mask) in zip(rows, tokenised(rows, tokenizer), strict=True)
    ]


def prompts(tokenizer: Any, count: int, seed: int) -> list[Row]:
    """The same prompts without answers."""
    found = []
    for row in answers(tokenizer, count, seed):
        length = row["prompt_length"]
        found.append({**row, "input_ids": row["input_ids"][:length], "completion_mask": [0] * length})
    return found


def build(root: Path, *, lmbda: float = 0.5, prompts_alone: bool = False, teacher_rows: int = 0) -> Path:
    """A whole workspace with `recipe.yaml` and a teacher in it; returns its directory.

    Args:
        root: the directory.
        lmbda: as in the recipe.
        prompts_alone: the rows have no answers.
        teacher_rows: rows by which the teacher's embeddings are padded.
    """
    recipe = RECIPE.format(lmbda=lmbda, sampled=", max_completion_length: 8" if lmbda else "")
    methods_kit.build(root, "distill", prompts if prompts_alone else answers, recipe)
    save_model(root / "teacher", layers=3, hidden=48, seed=7)
    if teacher_rows:
        _pad(root / "teacher", teacher_rows)
    return root


def _pad(directory: Path, rows: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(model.config.vocab_size + rows)
    model.save_pretrained(directory)


def score_here(root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Run the step in which the teacher scores the rows in this process; errors are raised."""
    from trainers.teacher import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LORA_CONFIG", "BLUEPRINTS_LAUNCH_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BLUEPRINTS_WORKSPACE", str(root))
    return main(["--recipe", str(root / "recipe.yaml"), *overrides])


def manifest(root: Path) -> dict[str, Any]:
    """The manifest of the stored scores."""
    found: dict[str, Any] = json.loads((root / "teacher_logits" / "_manifest.json").read_text())
    return found
