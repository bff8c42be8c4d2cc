"""Supervised fine-tuning with each way to train the weights: packed, resumed, measured, saved and proved."""

from __future__ import annotations

from pathlib import Path

import pytest
from sft_workspace import as_if_killed_at, build, losses, run_record, train_here

TUNINGS = {
    "full": ("lora=null", "training.learning_rate=1.0e-3"),
    "lora": ("lora.lora_dropout=0.1",),
    "qlora": ("lora.quantize_base=true",),
    "dora": ("lora.use_dora=true",),
}


def _covered(tuning: str) -> pytest.Mark | object:
    features = ["train", "resume", "packing", "eval", "export"]
    marks = [pytest.mark.covers(method="sft", tuning=tuning, world="1 process", feature=features)]
    return pytest.param(tuning, marks=marks if tuning == "lora" else [*marks, pytest.mark.slow])


@pytest.mark.parametrize("tuning", [_covered(name) for name in TUNINGS])
def test_a_packed_run_goes_on_as_if_it_had_not_been_killed(
    tuning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = build(tmp_path, packing=True)
    assert train_here(root, monkeypatch, *TUNINGS[tuning]) == 0
    record, unbroken = run_record(root), losses(root)
    kind = "model" if tuning == "full" else "adapter"
    assert record["proofs"][kind]["passed"]
    assert record["metrics"]["eval_loss_after"] < record["metrics"]["eval_loss_before"]
    (weights,) = (root / "output" / kind).glob("*.safetensors")
    trained = weights.read_bytes()

    as_if_killed_at(root, 4)
    assert train_here(root, monkeypatch, *TUNINGS[tuning]) == 0
    assert losses(root) == unbroken
    assert weights.read_bytes() == trained
    again = run_record(root)
    assert again["proofs"][kind]["passed"]
    assert again["metrics"]["eval_loss_after"] == record["metrics"]["eval_loss_after"]
