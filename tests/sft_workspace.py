"""A workspace as the initializers leave it, with a tiny random model: what the SFT tests train on."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

ROOT = Path(__file__).parents[1]
WORDS = [f"w{index}" for index in range(40)]
MAX_LENGTH = 64
RECIPE = """
method: sft
model: {{uri: "file:///model"}}
dataset: {{uri: "file:///rows"}}
{lora}
training:
  per_device_train_batch_size: 4
  per_device_eval_batch_size: 8
  learning_rate: 5.0e-3
  max_length: 64
  max_steps: 6
  save_steps: 2
eval: {{metric: exact_match, max_new_tokens: 8, samples: 4}}
"""
LORA = "lora: {r: 4, lora_alpha: 8}"


def raw_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompt and completion: repeat the words after `copy`, in upper case."""
    source = random.Random(seed)
    rows = []
    for _ in range(count):
        words = [source.choice(WORDS) for _ in range(source.randint(1, 6))]
        rows.append({"prompt": "copy " + " ".join(words), "completion": " " + " ".join(w.upper() for w in words)})
    return rows


def save_model(directory: Path, *, layers: int = 2, hidden: int = 32, seed: int = 0, tied: bool = False) -> Any:
    """A tiny random Llama and a word tokenizer; returns the tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    vocabulary = ["<pad>", "<eos>", "<unk>", "copy", *WORDS, *(word.upper() for word in WORDS)]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    raw.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "_manifest.json").write_text(json.dumps({"source": "file:///model", "files": {}}))
    return tokenizer


def tokenised(rows: list[dict[str, str]], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Token ids and completion masks of `rows`."""
    found = []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        found.append((ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))))
    return found


def write_shard(directory: Path, rows: list[dict[str, list[int]]]) -> None:
    """One Arrow IPC stream as the dataset initializer writes it."""
    directory.mkdir(parents=True, exist_ok=True)
    types = {"input_ids": pa.int32(), "completion_mask": pa.int8(), "seq_lengths": pa.int32()}
    table = pa.table({name: pa.array([row[name] for row in rows], pa.list_(types[name])) for name in rows[0]})
    with pa.OSFile(str(directory / "shard-00000.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def packed(rows: list[tuple[list[int], list[int]]], length: int) -> list[dict[str, list[int]]]:
    """Rows filled first-come, first-served up to `length` tokens."""
    found: list[dict[str, list[int]]] = []
    for ids, mask in rows:
        if not found or len(found[-1]["input_ids"]) + len(ids) > length:
            found.append({"input_ids": [], "completion_mask": [], "seq_lengths": []})
        found[-1]["input_ids"] += ids
        found[-1]["completion_mask"] += mask
        found[-1]["seq_lengths"].append(len(ids))
    return found


def build(workspace: Path | str, *, packing: bool = False, lora: str = LORA, rows: int = 40, **model: Any) -> Path:
    """A whole workspace with `recipe.yaml` in it; returns its directory."""
    root = Path(workspace)
    tokenizer = save_model(root / "model", **model)
    splits: dict[str, Any] = {}
    for split, count, seed in (("train", rows, 1), ("eval", 12, 2)):
        made = tokenised(raw_rows(count, seed), tokenizer)
        plain = [{"input_ids": ids, "completion_mask": mask} for ids, mask in made]
        lines = packed(made, MAX_LENGTH) if packing and split == "train" else plain
        write_shard(root / "dataset" / "prepared" / split, lines)
        splits[split] = {
            "rows": count, "sequences": len(lines), "tokens": sum(len(ids) for ids, _ in made),
            "trained_tokens": sum(sum(mask) for _, mask in made), "truncated": 0, "dropped": 0,
            "shards": ["shard-00000.arrow"],
        }  # fmt: skip
    prepared = {
        "fingerprint": "f" * 64,
        "method": "sft",
        "kind": "supervised",
        "format": "prompt_completion",
        "max_length": MAX_LENGTH,
        "packing": packing,
        "completion_only_loss": True,
        "splits": splits,
    }
    (root / "dataset" / "_manifest.json").write_text(json.dumps({"source": "file:///rows", "prepared": prepared}))
    (root / "recipe.yaml").write_text(RECIPE.format(lora=lora) + ("sft: {packing: true}\n" if packing else ""))
    return root


def environment(root: Path) -> dict[str, str]:
    """The environment of a step that runs in `root`."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "PET_", "TORCHELASTIC_", "BLUEPRINTS_", "LORA_CONFIG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return kept | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "BLUEPRINTS_WORKSPACE": str(root),
        "BLUEPRINTS_TERMINATION_LOG": str(root / "termination"), "BLUEPRINTS_PROGRESS": str(root / "progress.json"),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def command(root: Path, *overrides: str, processes: int = 1, launch: bool = False) -> list[str]:
    """The trainer's command line: under torchrun, or alone in this interpreter for one process."""
    arguments = ["-m", "trainers", "--recipe", str(root / "recipe.yaml"), *overrides]
    if not launch and processes == 1:
        return [sys.executable, *arguments]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(processes),
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *arguments]  # fmt: skip
    return [sys.executable, "-m", "trainers.launch", *torchrun] if launch else torchrun


def train(root: Path, *overrides: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run the trainer to its end; stderr is in stdout."""
    return subprocess.run(
        command(root, *overrides, **how), env=environment(root), cwd=root, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def train_here(root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Run the trainer in this process, which has its libraries imported already; errors are raised."""
    from trainers.__main__ import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LORA_CONFIG", "BLUEPRINTS_LAUNCH_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BLUEPRINTS_WORKSPACE", str(root))
    monkeypatch.setenv("BLUEPRINTS_PROGRESS", str(root / "progress.json"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the proof's process
    return main(["--recipe", str(root / "recipe.yaml"), *overrides])


def losses(root: Path) -> list[float]:
    """The training losses of `metrics.jsonl`, in the order of steps."""
    lines = [json.loads(line) for line in (root / "output" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def run_record(root: Path) -> dict[str, Any]:
    """`run.json` of the workspace."""
    found: dict[str, Any] = json.loads((root / "output" / "run.json").read_text())
    return found


def as_if_killed_at(root: Path, step: int) -> None:
    """Leave in the output what a run killed soon after `step` leaves."""
    record = run_record(root)
    (root / "output" / "run.json").write_text(json.dumps(record | {"status": "running"}))
    for path in (root / "output").iterdir():
        kind, _, number = path.name.partition("-")
        if kind in ("adapter", "model", "proof") or (kind == "checkpoint" and int(number) > step):
            shutil.rmtree(path)
