"""QAT: what rounds while training is what the quantised model computes, and the report says what it was good for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from methods_kit import build, check_golden, curve, interrupt, supervised
from sft_workspace import losses, run_record, train_here

from blueprints import RecipeError, load_recipe
from blueprints.errors import UsageError

pytestmark = pytest.mark.usefixtures("proved_here")
KINDS = [
    "int8_dynamic_act_int4_weight",
    "int2_weight_only",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("int3_weight_only", "int4_weight_only", "int8_weight_only")
    ),
]
ALONE = "qat.compare=false"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return build(tmp_path, "qat", supervised, "qat: {group_size: 16}\n")


# What is computed ----------------------------------------------------------------------------------------------------


@pytest.mark.covers(method="qat", tuning="full", world="1 process", feature=["train", "eval"])
def test_losses_equal_plain_trl_and_torchao(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from sft_workspace import raw_rows
    from torch import nn
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
    from torchao.quantization.qat import QATConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    assert train_here(root, monkeypatch, "lora=null", ALONE, "training.max_steps=8") == 0
    import torch

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(16))

    def layer(module: Any, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "lm_head"

    quantize_(model, QATConfig(base, step="prepare"), filter_fn=layer)
    args = SFTConfig(
        output_dir=str(root / "plain"), per_device_train_batch_size=4, learning_rate=5e-3, max_length=64,
        max_steps=8, lr_scheduler_type="cosine", warmup_steps=0.03, logging_steps=1, seed=42, use_cpu=True, bf16=False,
        activation_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        optim="adamw_torch",  # another order of additions would round some weight the other way
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    rows = Dataset.from_list(raw_rows(40, 1))
    plain = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    plain.train()
    expected = [line["loss"] for line in plain.state.log_history if "loss" in line]
    assert losses(root) == pytest.approx(expected, rel=1e-5)


@pytest.mark.covers(method="qat", tuning=["full", "lora", "dora"], world="1 process", feature=["train", "export"])
@pytest.mark.parametrize("case", ["full", "lora", "dora"])
def test_golden_losses(case: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("qat", case, root, monkeypatch, ALONE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_quantised_model_computes_what_was_trained(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tuning = [] if kind == "int2_weight_only" else ["lora=null"]  # an adapter once: the sum is what rounds
    assert train_here(root, monkeypatch, *tuning, ALONE, f"qat.base_config={kind}") == 0
    record = run_record(root)
    assert record["proofs"]["quantized"]["passed"]
    assert record["proofs"]["quantized"]["difference"] < 1e-5
    assert set(record["artifacts"]) >= {"model", "quantized"}
    # As a user loads it, without further settings.
    model = AutoModelForCausalLM.from_pretrained(root / "output" / "quantized").eval()
    AutoTokenizer.from_pretrained(root / "output" / "quantized")
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert type(model.lm_head.weight) is torch.nn.Parameter
    total = count = 0.0
    for row in supervised(AutoTokenizer.from_pretrained(root / "model"), 12, 2):
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(row["completion_mask"][1:], dtype=torch.bool)
        total, count = total - found[mask].sum().item(), count + mask.sum().item()
    metrics = record["metrics"]
    # Transformers averages over batches of unequal numbers of tokens.
    assert total / count == pytest.approx(metrics["eval_loss_after"], rel=0.02)
    assert metrics["eval_loss_after"] != metrics["eval_loss_unquantized_after"]


# What it was good for ------------------------------------------------------------------------------------------------


def test_the_three_losses_are_those_of_a_plain_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "qat: {group_size: 16, base_config: int2_weight_only}\n"
    root = build(tmp_path / "qat", "qat", supervised, options)
    steps = "training.max_steps=40"
    assert train_here(root, monkeypatch, steps) == 0
    plain = build(tmp_path / "sft", "sft", supervised)
    assert train_here(plain, monkeypatch, steps) == 0
    found = run_record(root)["quantization"]
    metrics = run_record(root)["metrics"]
    assert found["full_precision"] == pytest.approx(run_record(plain)["metrics"]["eval_loss_after"], rel=1e-6)
    assert found["qat"] == metrics["eval_loss_after"]
    assert found["post_training"] > found["full_precision"]
    share = (found["post_training"] - found["qat"]) / (found["post_training"] - found["full_precision"])
    assert found["recovered"] == pytest.approx(share)
    assert found["recovered"] > 0.5
    assert "What quantisation costs" in (root / "output" / "report.html").read_text()
    # The comparison changes nothing about the training itself.
    alone = build(tmp_path / "alone", "qat", supervised, options)
    assert train_here(alone, monkeypatch, steps, ALONE) == 0
    assert losses(alone) == losses(root)
    assert "quantization" not in run_record(alone)


@pytest.mark.covers(method="qat", tuning="lora", world="1 process", feature="resume")
def test_a_run_stopped_in_either_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "qat: {group_size: 16}\n"
    unbroken, root = (build(tmp_path / name, "qat", supervised, options) for name in ("unbroken", "stopped"))
    assert train_here(unbroken, monkeypatch) == 0
    interrupt(root, monkeypatch, 2)
    assert (root / "output" / "plain" / "checkpoint-2").is_dir()
    assert run_record(root)["status"] == "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("trainers.qat.write_json", _then_stop)
        with pytest.raises(KeyboardInterrupt):
            train_here(root, patch)  # ends when the first training is done
    kept = json.loads((root / "output" / "plain.json").read_text())
    assert train_here(root, monkeypatch) == 0
    assert losses(root) == losses(unbroken)
    assert run_record(root)["quantization"] == run_record(unbroken)["quantization"]
    assert run_record(root)["quantization"]["full_precision"] == kept["full_precision"]
    assert not (root / "output" / "plain").exists()
    assert curve(root, "num_tokens") == curve(unbroken, "num_tokens")


def _then_stop(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))
    raise KeyboardInterrupt


# What is refused -----------------------------------------------------------------------------------------------------


def test_a_group_that_does_not_fit_the_layers_is_refused_before_training(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"no whole number of groups of 24.*\(14 of 14 layers\)") as refused:
        train_here(root, monkeypatch, "qat.group_size=24")
    assert refused.value.todo == "use one of: 32, 16, 8"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["lora.quantize_base=true"], "lora.quantize_base", "QLoRA cannot be combined with the method qat"),
        (["lora.lora_dropout=0.1"], "lora.lora_dropout", "adapter's input alone"),
        (["resources.strategy=fsdp", "resources.gpu=2"], "resources.strategy", "apart from each other"),
        (["output.merge=true"], "output.merge", "saved in any case"),
        (["qat.base_config=int5"], "qat.base_config", "int4_weight_only"),
        (["qat.group_size=4"], "qat.group_size", "8"),
    ],
)
def test_what_cannot_work_is_refused_in_the_recipe(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe("qat-lora", overrides=overrides, environ={})
    assert [fault.key for fault in refused.value.faults] == [key]
    assert words in str(refused.value)
