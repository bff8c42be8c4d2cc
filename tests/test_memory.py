"""What saves memory is what was asked for: optimizers by their own state, kernels by the modules that run on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sft_workspace import build, train_here

from blueprints.errors import EnvironmentFault, JobFailedError, UsageError
from blueprints.recipe import load_recipe


def stepped(optim: str, path: Path) -> tuple[Any, Any]:
    """A small model and Transformers' optimizer of that name after one step."""
    import torch
    from transformers import Trainer, TrainingArguments

    model = torch.nn.Sequential(torch.nn.Embedding(128, 64), torch.nn.Linear(64, 128), torch.nn.Linear(128, 4))
    args = TrainingArguments(output_dir=str(path), optim=optim, use_cpu=True, report_to="none")
    optimizer = Trainer(model=model, args=args).create_optimizer()
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        ("adamw_torch", "torch AdamW, state of 136,224 bytes, 0 of 10 tensors in 8 bits"),
        ("adamw_torch_fused", "torch AdamW"),
        ("adamw_bnb_8bit", "bitsandbytes AdamW, state of 87,072 bytes, 2 of 10 tensors in 8 bits"),
        ("lion_8bit", "bitsandbytes Lion, state of 43,536 bytes, 1 of 5 tensors in 8 bits"),
        ("lion_32bit", "bitsandbytes Lion, state of 68,112 bytes, 0 of 5 tensors in 8 bits"),
        ("adafactor", "transformers Adafactor"),
        ("sgd", "torch SGD"),
    ],
)
def test_the_optimizer_is_told_from_its_state(optim: str, words: str, tmp_path: Path) -> None:
    from trainers.memory import check_optimizer

    model, optimizer = stepped(optim, tmp_path)
    assert words in check_optimizer(optim, optimizer, model)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("adamw_bnb_8bit", "adamw_torch"),
        ("adamw_torch", "adamw_bnb_8bit"),
        ("lion_8bit", "lion_32bit"),
        ("adamw_torch_fused", "adamw_torch"),
        ("paged_adamw_32bit", "paged_adamw_8bit"),
    ],
)
def test_another_optimizer_stops_the_run(asked: str, given: str, tmp_path: Path) -> None:
    from trainers.memory import check_optimizer

    model, optimizer = stepped(given, tmp_path)
    with pytest.raises(JobFailedError, match=f"training.optim={asked}, in effect"):
        check_optimizer(asked, optimizer, model)


def test_a_run_says_what_its_optimizer_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build(tmp_path, hidden=64)
    how = ("training.optim=adamw_bnb_8bit", "training.gradient_checkpointing=true", "training.max_steps=2")
    assert train_here(root, monkeypatch, *how) == 0
    said = capsys.readouterr().out
    assert "optimizer: bitsandbytes AdamW, state of" in said
    assert "no trained weight has 4,096 values or more, so 8 bits save nothing here" in said
    assert "gradient checkpointing   on" in said


def test_kernels_and_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    import torch

    from trainers import memory

    def recipe(*overrides: str) -> Any:
        return load_recipe("sft", overrides=overrides, environ={}).recipe

    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(EnvironmentFault, match="needs bitsandbytes"):
        memory.check_installed(recipe("training.optim=lion_8bit"), torch.nn.Linear(1, 1))
    with pytest.raises(EnvironmentFault, match="needs liger_kernel"):
        memory.check_installed(recipe("training.use_liger_kernel=true"), torch.nn.Linear(1, 1))
    monkeypatch.undo()
    known = types.ModuleType("liger_kernel.transformers.monkey_patch")
    vars(known)["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"llama": None}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, known.__name__, known)
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda _name: object())
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8))
    with pytest.raises(UsageError, match="no kernels for the architecture gpt2"):
        memory.check_installed(recipe("training.use_liger_kernel=true"), model)
    assert memory.liger_modules(model) == 0
