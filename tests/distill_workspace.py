"""A workspace as the initializers leave it for a distillation: a tiny student, a tiny teacher, rows with prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sft_workspace import MAX_LENGTH, raw_rows, save_model, tokenised

RECIPE = """
method: distill
model: {{uri: "file:///model"}}
dataset: {{uri: "file:///rows"}}
{lora}
training:
  per_device_train_batch_size: 4
  per_device_eval_batch_size: 8
  learning_rate: 5.0e-3
  max_length: 64
  max_steps: 4
  save_steps: 2
eval: {{metric: exact_match, max_new_tokens: 8, samples: 4}}
distill: {{teacher: "file:///teacher", max_completion_length: 8, lmbda: 0.5}}
"""
LORA = "lora: {r: 4, lora_alpha: 8}"
TYPES = {
    "input_ids": pa.list_(pa.int32()),
    "completion_mask": pa.list_(pa.int8()),
    "prompt_length": pa.int32(),
    "prompt": pa.string(),
}


def sequences(rows: list[dict[str, str]], tokenizer: Any, *, held_out: bool, prompts: bool) -> list[dict[str, Any]]:
    """Rows as the dataset initializer writes them; `prompts`: without their answers."""
    found = []
    for row, (ids, mask) in zip(rows, tokenised(rows, tokenizer), strict=True):
        length = mask.index(1)
        made: dict[str, Any] = {"input_ids": ids[:length] if prompts else ids, "prompt_length": length}
        made["completion_mask"] = mask[:length] if prompts else mask
        found.append(made | ({"prompt": row["prompt"]} if held_out else {}))
    return found


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    """One Arrow IPC stream as the dataset initializer writes it."""
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: pa.array([row[name] for row in rows], TYPES[name]) for name in rows[0]})
    with pa.OSFile(str(directory / "shard-00000.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def build(
    workspace: Path | str, *, lora: str = LORA, rows: int = 40, prompts: bool = False, lmbda: float = 0.5
) -> Path:
    """A whole workspace with `recipe.yaml` in it; returns its directory."""
    root = Path(workspace)
    tokenizer = save_model(root / "model")
    save_model(root / "teacher", layers=3, hidden=48, seed=7)
    splits: dict[str, Any] = {}
    for split, count, seed in (("train", rows, 1), ("eval", 12, 2)):
        made = sequences(raw_rows(count, seed), tokenizer, held_out=split == "eval", prompts=prompts)
        write_rows(root / "dataset" / "prepared" / split, made)
        splits[split] = {
            "rows": count, "sequences": count, "tokens": sum(len(row["input_ids"]) for row in made),
            "trained_tokens": sum(sum(row["completion_mask"]) for row in made), "truncated": 0, "dropped": 0,
            "shards": ["shard-00000.arrow"],
        }  # fmt: skip
    prepared = {
        "fingerprint": "f" * 64,
        "method": "distill",
        "kind": "supervised",
        "format": "prompt" if prompts else "prompt_completion",
        "max_length": MAX_LENGTH,
        "packing": False,
        "completion_only_loss": True,
        "splits": splits,
    } | ({"max_completion_length": 8} if lmbda else {})
    (root / "dataset" / "_manifest.json").write_text(json.dumps({"source": "file:///rows", "prepared": prepared}))
    (root / "recipe.yaml").write_text(RECIPE.format(lora=lora).replace("lmbda: 0.5", f"lmbda: {lmbda}"))
    if not lmbda:
        recipe = (root / "recipe.yaml").read_text().replace(" max_completion_length: 8,", "")
        (root / "recipe.yaml").write_text(recipe)
    return root


def score_here(root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Run the step in which the teacher scores the rows in this process; errors are raised."""
    from trainers.teacher import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LORA_CONFIG", "BLUEPRINTS_LAUNCH_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BLUEPRINTS_WORKSPACE", str(root))
    return main(["--recipe", str(root / "recipe.yaml"), *overrides])
