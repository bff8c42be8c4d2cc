"""What the SFT trainer computes: the same as plain TRL on the raw rows, and the same packed as not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_workspace import build, losses, packed, raw_rows, run_record, save_model, tokenised, train_here

from blueprints.errors import UsageError


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_losses_equal_plain_trl_on_the_raw_rows(lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    root = build(tmp_path)
    assert train_here(root, monkeypatch, *([] if lora else ["lora=null"]), "training.max_steps=20") == 0
    args = SFTConfig(
        output_dir=str(tmp_path / "plain"), per_device_train_batch_size=4, learning_rate=5e-3, max_length=64,
        max_steps=20, lr_scheduler_type="cosine", warmup_steps=0.03, logging_steps=1, seed=42, use_cpu=True, bf16=False,
        activation_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    plain = SFTTrainer(
        model=str(root / "model"),
        args=args,
        train_dataset=Dataset.from_list(raw_rows(40, 1)),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    plain.train()
    expected = [line["loss"] for line in plain.state.log_history if "loss" in line]
    assert len(expected) == 20
    assert losses(root) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_packed_documents_have_the_logits_they_have_alone(kernel: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    tokenizer = save_model(tmp_path / "model")
    rows = tokenised(raw_rows(12), tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation=kernel).eval()
    lines = packed(rows, 64)
    assert max(len(line["seq_lengths"]) for line in lines) > 2
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(lines)
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids, _ in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_packed_run_measures_its_isolation(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path, packing=True)
    assert train_here(root, monkeypatch, f"model.attn_implementation={kernel}", "training.max_steps=2",
                      "training.per_device_train_batch_size=1") == 0  # fmt: skip
    assert "measured on 4 documents" in run_record(root)["effective"]["packing isolation"]


def test_a_model_that_lets_documents_see_each_other_is_stopped(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trainers.settings import isolation

    save_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    whole = model.forward

    def leaking(position_ids: Any, **inputs: Any) -> Any:
        # What a kernel does that knows nothing of positions: one mask over the whole row.
        return whole(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), position_ids=position_ids)

    model.forward = leaking
    with pytest.raises(UsageError, match="see each other"):
        isolation(model, list(range(4, 20)), [8, 8], torch.device("cpu"), False)


def test_trained_tokens_are_those_of_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    train_here(root, monkeypatch, "training.max_steps=1")
    row = run_record(root)["proofs"]["mask"]["rows"][0]
    raw = raw_rows(40, 1)[0]
    assert row["text"].replace(" ", "") == f"{raw['prompt']}⟦{raw['completion']}<eos>⟧".replace(" ", "")


def test_a_row_without_a_trained_token_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sft_workspace import write_shard

    from blueprints.errors import DataError

    root = build(tmp_path)
    rows = [
        {"input_ids": ids, "completion_mask": mask} for ids, mask in tokenised(raw_rows(40, 1), save_model(root / "m"))
    ]
    rows[17]["completion_mask"] = [0] * len(rows[17]["input_ids"])
    write_shard(root / "dataset" / "prepared" / "train", rows)
    with pytest.raises(DataError, match="row 17 has no token that carries loss"):
        train_here(root, monkeypatch)


def test_rows_for_another_tokenizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blueprints.errors import DataError

    root = build(tmp_path)
    path = root / "dataset" / "_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["prepared"]["tokenizer_sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="another tokenizer"):
        train_here(root, monkeypatch)


def test_the_tokenizer_digest_is_the_initializers(tmp_path: Path) -> None:
    from initializers.tokens import tokenizer_digest as theirs
    from trainers.data import tokenizer_digest as ours

    save_model(tmp_path)
    assert ours(tmp_path) == theirs(tmp_path)
