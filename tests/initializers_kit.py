"""What the tests of the initializers share: running a step, small models, and reading what was prepared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RECIPE = """
method: sft
model: {{uri: "file:///model"}}
dataset: {{uri: "file:///rows"}}
{more}
"""
QUESTION = "What is the capital of France?"
ANSWER = "Paris."
CHAT = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}


def tiny_model(directory: Path, template: str | None = CHATML_MARKED, *, bos: bool = False) -> Path:
    """A model directory with a byte-level tokenizer (one token per byte) and weights of one number."""
    import struct

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    } | ({"bos_token": "<s>"} if bos else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "vocab_size": len(vocabulary), "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return directory


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON value per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe_file(directory: Path, more: str = "") -> Path:
    """A recipe on disk; `more` is further YAML."""
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(more=more))
    return path


def environment(workspace: Path, uri: str | Path, *, recipe: Path | str | None = None, **more: str) -> dict[str, str]:
    """The environment of a step."""
    uri = f"file://{uri}" if isinstance(uri, Path) else uri
    env = {"STORAGE_URI": uri, "BLUEPRINTS_WORKSPACE": str(workspace)}
    return env | ({"BLUEPRINTS_RECIPE": str(recipe)} if recipe is not None else {}) | more


def step(name: str, env: Mapping[str, str]) -> int:
    """Run a step in this process; raises its error."""
    from initializers.__main__ import main

    return main([name], env)


def spawn(name: str, env: Mapping[str, str], **how: Any) -> subprocess.Popen[str]:
    """Start a step as a process of its own, as a container would."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", "initializers", name],
        env=kept | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | dict(env),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how,
    )  # fmt: skip


def run(name: str, env: Mapping[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a step as a process of its own, to its end."""
    process = spawn(name, env, **how)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def prepare(
    tmp: Path, data: Path | str, more: str = "", *, template: str | None = CHATML_MARKED, bos: bool = False
) -> dict[str, Any]:
    """Prepare `data` for a recipe with `more` in it; returns the manifest's `prepared`."""
    workspace = tmp / "work"
    tiny_model(workspace / "model", template, bos=bos)
    step("dataset", environment(workspace, data, recipe=recipe_file(tmp, more)))
    found: dict[str, Any] = manifest(workspace)["prepared"]
    return found


METHODS = {
    "sft": "",
    "qat": "",
    "dpo": "",
    "distill": "distill: {teacher: 'file:///teacher', lmbda: 0.5}",
    "distill-data": "distill: {teacher: 'file:///teacher', lmbda: 0}",
    "distill-student": "distill: {teacher: 'file:///teacher', lmbda: 1}",
    "grpo": "grpo: {reward_funcs: [{name: length, args: {max: 100}}], max_completion_length: 8}",
    "ppo": "ppo: {reward_funcs: [{name: length, args: {max: 100}}], max_completion_length: 8}",
}
"""The block each method needs."""


def prepare_for(tmp: Path, method: str, rows: Iterable[Any] | Path, *overrides: str, **how: Any) -> dict[str, Any]:
    """Prepare rows for a method; returns the manifest's `prepared`. `how`: of the model."""
    data = rows if isinstance(rows, Path) else write_jsonl(tmp / "rows.jsonl", rows)
    recipe = tmp / "recipe.yaml"
    recipe.write_text(RECIPE.format(more=METHODS[method]).replace("method: sft", f"method: {method.split('-')[0]}"))
    tiny_model(tmp / "work" / "model", **how)
    env = environment(tmp / "work", data, recipe=recipe, BLUEPRINTS_OVERRIDES=json.dumps(overrides))
    step("dataset", env)
    found: dict[str, Any] = manifest(tmp / "work")["prepared"]
    return found


def manifest(workspace: Path, name: str = "dataset") -> dict[str, Any]:
    """The manifest of a directory of the workspace."""
    found: dict[str, Any] = json.loads((workspace / name / "_manifest.json").read_text())
    return found


def sequences(workspace: Path, split: str = "train") -> list[dict[str, Any]]:
    """The prepared sequences, read as Arrow streams."""
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    for path in sorted((workspace / "dataset" / "prepared" / split).glob("shard-*.arrow")):
        with pa.ipc.open_stream(path.read_bytes()) as reader:
            rows += reader.read_all().to_pylist()
    return rows


def texts(workspace: Path, split: str = "train") -> list[tuple[str, str]]:
    """Each sequence as text, and its trained tokens as text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    found = []
    for row in sequences(workspace, split):
        trained = [token for token, loss in zip(row["input_ids"], row["completion_mask"], strict=True) if loss]
        found.append((tokenizer.decode(row["input_ids"]), tokenizer.decode(trained)))
    return found
