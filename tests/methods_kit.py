"""What the tests of all methods share: a workspace of prepared rows of any kind, golden losses, ways of tuning."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sft_workspace import WORDS, losses, raw_rows, save_model, tokenised, train_here

from blueprints import load_recipe
from blueprints.recipe.rows import KINDS, row_options

GOLDEN = Path(__file__).parent / "golden"
TUNINGS = {
    "full": ("lora=null",),
    "lora": (),
    "qlora": ("lora.quantize_base=true",),
    "dora": ("lora.use_dora=true",),
}
"""Overrides for each way of tuning, of a recipe that has `lora`."""
TRAINING = """
training:
  per_device_train_batch_size: 4
  per_device_eval_batch_size: 8
  learning_rate: 5.0e-3
  max_length: 64
  max_steps: 4
  save_steps: 2
"""

Row = Mapping[str, Any]


def build(root: Path, method: str, rows: Callable[[Any, int, int], list[Row]], recipe: str = "", **model: Any) -> Path:
    """A whole workspace for `method`, with a tiny random model and `recipe.yaml`.

    Args:
        rows: makes the prepared rows, given the tokenizer, their number and a seed.
        recipe: YAML lines added to method, model, dataset, lora and training.
        model: settings of `save_model`.

    Returns:
        `root`.
    """
    tokenizer = save_model(root / "model", **model)
    splits: dict[str, Any] = {}
    for split, count, seed in (("train", 40, 1), ("eval", 12, 2)):
        write_rows(root / "dataset" / "prepared" / split, rows(tokenizer, count, seed))
        counts = {"rows": count, "sequences": count, "tokens": 0, "trained_tokens": 0, "truncated": 0, "dropped": 0}
        splits[split] = counts | {"shards": ["shard-00000.arrow"]}
    sources = 'model: {uri: "file:///model"}\ndataset: {uri: "file:///rows"}\nlora: {r: 4, lora_alpha: 8}\n'
    path = root / "recipe.yaml"
    path.write_text(f"method: {method}\n{sources}{TRAINING}{recipe}")
    options = row_options(load_recipe(str(path), environ={}).recipe)
    prepared = {"fingerprint": "f" * 64, "method": method, "kind": KINDS[method], "max_length": 64, "splits": splits}
    manifest = {"source": "file:///rows", "prepared": prepared | options}
    (root / "dataset" / "_manifest.json").write_text(json.dumps(manifest))
    return root


def write_rows(directory: Path, rows: Sequence[Row]) -> None:
    """One Arrow IPC stream as the dataset initializer writes it: lists of int32 (masks of int8), texts."""
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: _array(name, [row[name] for row in rows]) for name in rows[0]})
    with pa.OSFile(str(directory / "shard-00000.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _array(name: str, values: list[Any]) -> pa.Array:
    if isinstance(values[0], list):
        return pa.array(values, pa.list_(pa.int8() if name.endswith("_mask") else pa.int32()))
    return pa.array(values)


def preferences(tokenizer: Any, count: int, seed: int) -> list[Row]:
    """Preferences as prepared: the words of `copy` in upper case rather than in lower case."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        words = [source.choice(WORDS) for _ in range(source.randint(1, 6))]
        other = [source.choice(WORDS) for _ in range(source.randint(1, 6))]
        texts = {"prompt": "copy " + " ".join(words), "chosen": " ".join(words).upper(), "rejected": " ".join(other)}
        ids = {f"{name}_ids": tokenizer(text)["input_ids"] for name, text in texts.items()}
        for name in ("chosen_ids", "rejected_ids"):
            ids[name] = [*ids[name], tokenizer.eos_token_id]
        found.append(ids | texts)
    return found


def check_golden(method: str, case: str, root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Train 4 steps by `root`'s recipe and hold the losses against `tests/golden/<method>.json` (rtol 1e-5).

    With `UPDATE_GOLDEN=1` in the environment the file is rewritten instead.
    """
    path = GOLDEN / f"{method}.json"
    golden = json.loads(path.read_text()) if path.exists() else {}
    assert train_here(root, monkeypatch, *TUNINGS[case], *overrides) == 0
    found = losses(root)
    assert len(found) == 4
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(golden | {case: found}, indent=1, sort_keys=True) + "\n")
        return
    assert found == pytest.approx(golden[case], rel=1e-5)


def curve(root: Path, name: str) -> list[float]:
    """A number of `metrics.jsonl`, in the order of steps."""
    lines = [json.loads(line) for line in (root / "output" / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def interrupt(root: Path, monkeypatch: pytest.MonkeyPatch, step: int, *overrides: str) -> None:
    """Train in this process until `step`, then ask it to stop: it saves a checkpoint and leaves with 143."""
    from trainers.callbacks import StopOnRequest
    from trainers.process import STOP

    whole = StopOnRequest.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        STOP.asked = STOP.asked or state.global_step == step
        return whole(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StopOnRequest, "on_step_end", on_step_end)
        patch.setattr(STOP, "asked", False)
        with pytest.raises(SystemExit) as stopped:
            train_here(root, monkeypatch, *overrides)
    STOP.asked = False
    assert stopped.value.code == 143


def prompts(tokenizer: Any, count: int, seed: int) -> list[Row]:
    """Prompts as prepared: `copy` and words, with the right answer among the row's columns."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        words = [source.choice(WORDS) for _ in range(source.randint(1, 6))]
        text, answer = "copy " + " ".join(words), " ".join(words).upper()
        ids = {"prompt_ids": tokenizer(text)["input_ids"]}
        texts = {"prompt": text, "messages": json.dumps(text), "columns": json.dumps({"answer": answer})}
        found.append(ids | texts | {"reference": answer})
    return found


def tokenised_prompts(root: Path) -> list[list[int]]:
    """The tokens of the training prompts of a workspace made with `prompts`."""
    from transformers import AutoTokenizer

    rows = prompts(AutoTokenizer.from_pretrained(root / "model"), 40, 1)
    return [list(row["prompt_ids"]) for row in rows]


def supervised(tokenizer: Any, count: int, seed: int) -> list[Row]:
    """Rows as prepared for sft, qat and distillation: the words of `copy` in upper case carry loss."""
    return [{"input_ids": ids, "completion_mask": mask} for ids, mask in tokenised(raw_rows(count, seed), tokenizer)]
