"""DPO: what is computed, with which reference, on which tokens, and what a user is told."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from methods_kit import build, check_golden, curve, interrupt, preferences
from sft_workspace import losses, run_record, train_here

from blueprints import RecipeError, load_recipe
from blueprints.recipe.schema import DPOOptions

pytestmark = pytest.mark.usefixtures("proved_here")
LOSSES = get_args(DPOOptions.model_fields["loss_type"].annotation)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return build(tmp_path, "dpo", preferences)


def plain_trl(root: Path, *, lora: bool, steps: int = 4, **settings: Any) -> Any:
    """TRL's own DPOTrainer on the raw texts of the same rows."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    rows = [
        {"prompt": row["prompt"], "chosen": f" {row['chosen']} <eos>", "rejected": f" {row['rejected']} <eos>"}
        for row in preferences(tokenizer, 40, 1)
    ]
    args = DPOConfig(
        output_dir=str(root / "plain"), per_device_train_batch_size=4, learning_rate=5e-3, max_steps=steps,
        lr_scheduler_type="cosine", warmup_steps=0.03, logging_steps=1, seed=42, use_cpu=True, bf16=False,
        activation_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=str(root / "model"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


# What is computed ----------------------------------------------------------------------------------------------------


@pytest.mark.covers(method="dpo", tuning=["full", "lora"], world="1 process", feature=["train", "eval"])
@pytest.mark.parametrize("case", ["lora", "full", "full with a second model"])
def test_the_curves_equal_plain_trl_on_the_raw_texts(case: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {"lora": [], "full": ["lora=null"]}.get(case, ["lora=null", "dpo.precompute_ref_log_probs=false"])
    assert train_here(root, monkeypatch, *overrides, "training.max_steps=8") == 0
    expected = plain_trl(root, lora=case == "lora", steps=8)
    for name in ("loss", "rewards/chosen", "rewards/margins", "logps/rejected"):
        assert curve(root, name) == pytest.approx([line[name] for line in expected], rel=1e-5, abs=1e-6), name
    assert ("second model" in run_record(root)["effective"]["reference"]) == (case == "full with a second model")


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_equals_plain_trl(loss: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smoothing = 0.1 if loss in ("robust", "exo_pair", "aot", "aot_unpaired") else 0.0
    overrides = [f"dpo.loss_type={loss}", *([f"dpo.label_smoothing={smoothing}"] if smoothing else [])]
    assert train_here(root, monkeypatch, *overrides) == 0
    expected = plain_trl(root, lora=True, loss_type=[loss], label_smoothing=smoothing)
    assert losses(root) == pytest.approx([line["loss"] for line in expected], rel=1e-5)


def test_the_losses_are_those_of_trl() -> None:
    from trl import DPOConfig

    said = DPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert re.findall(r"`'(\w+)'`", said) == list(LOSSES)


@pytest.mark.covers(
    method="dpo", tuning=["full", "lora", "qlora", "dora"], world="1 process", feature=["train", "export"]
)
@pytest.mark.parametrize("case", ["full", "lora", "qlora", "dora"])
def test_golden_losses(case: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("dpo", case, root, monkeypatch)


def test_preference_accuracy_is_what_the_models_own_probabilities_say(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert train_here(root, monkeypatch, "lora=null", "training.max_steps=8") == 0
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    rows = preferences(tokenizer, 12, 2)

    def accuracy(directory: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(directory).eval()

        def log_prob(prompt: Sequence[int], answer: Sequence[int]) -> float:
            ids = torch.tensor([[*prompt, *answer]])
            with torch.no_grad():
                found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            return float(found[len(prompt) - 1 :].sum())

        better = [
            log_prob(r["prompt_ids"], r["chosen_ids"]) > log_prob(r["prompt_ids"], r["rejected_ids"]) for r in rows
        ]
        return sum(better) / len(rows)

    metrics = run_record(root)["metrics"]
    assert metrics["preference_accuracy_before"] == pytest.approx(accuracy(root / "model"))
    assert metrics["preference_accuracy_after"] == pytest.approx(accuracy(root / "output" / "model"))
    assert metrics["preference_accuracy_after"] > metrics["preference_accuracy_before"]
    assert metrics["reward_margin_before"] == pytest.approx(0, abs=1e-5)
    assert metrics["reward_margin_after"] > 0.1


# The reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["lora.init_lora_weights=pissa", "lora.init_lora_weights=olora"])
def test_an_adapter_taken_out_of_the_base_is_compared_with_the_untouched_base(
    start: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_here(root, monkeypatch, start, "training.max_steps=2") == 0
    # With that adapter switched off, the base would be another model from the first step on.
    assert curve(root, "rewards/chosen")[0] == pytest.approx(0, abs=1e-4)
    assert losses(root)[0] == pytest.approx(math.log(2), abs=1e-4)


def test_without_a_reference_the_loss_is_of_the_policy_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ("training.per_device_train_batch_size=1", "training.max_steps=3")
    assert train_here(root, monkeypatch, "dpo.reference_free=true", "dpo.beta=0.2", *one) == 0
    for loss, chosen, rejected in zip(
        losses(root), curve(root, "logps/chosen"), curve(root, "logps/rejected"), strict=True
    ):
        assert loss == pytest.approx(math.log1p(math.exp(-0.2 * (chosen - rejected))), rel=1e-4)
    assert run_record(root)["effective"]["reference"].startswith("none")


@pytest.mark.covers(method="dpo", tuning="full", world="1 process", feature="resume")
def test_a_stopped_run_goes_on_with_the_reference_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainers.dpo import Trainer

    steps = ("lora=null", "training.max_steps=6")
    unbroken, root = (build(tmp_path / name, "dpo", preferences) for name in ("unbroken", "stopped"))
    assert train_here(unbroken, monkeypatch, *steps) == 0
    interrupt(root, monkeypatch, 3, *steps)
    whole = Trainer.log_probs

    def log_probs(self: Any, *args: Any, reference: bool) -> Any:
        assert not reference, "the reference was computed again"
        return whole(self, *args, reference=reference)

    monkeypatch.setattr(Trainer, "log_probs", log_probs)
    assert train_here(root, monkeypatch, *steps) == 0
    for name in ("loss", "rewards/chosen", "rewards/rejected", "num_tokens"):
        assert curve(root, name) == curve(unbroken, name), name
    ours, theirs = run_record(root)["metrics"], run_record(unbroken)["metrics"]
    for name in ("train_loss", "eval_loss_before", "eval_loss_after", "preference_accuracy_after", "tokens"):
        assert ours[name] == theirs[name], name
    weights = "output/model/model.safetensors"
    assert (root / weights).read_bytes() == (unbroken / weights).read_bytes()


# What is shown and what is refused -----------------------------------------------------------------------------------


def test_both_answers_are_shown_and_the_rejected_one_carries_no_loss_where_it_has_none(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(root, monkeypatch, "training.max_steps=1") == 0
    rows = run_record(root)["proofs"]["mask"]["rows"]
    assert [row["answer"] for row in rows] == ["chosen", "rejected"] * 2
    assert all("⟦" in row["text"] and row["text"].endswith("<eos>⟧") for row in rows)
    assert "row 0, rejected: " in capsys.readouterr().out
    samples = [json.loads(line) for line in (root / "output" / "samples.jsonl").read_text().splitlines()]
    assert set(samples[0]) == {"prompt", "reference", "before", "after"}
    assert "reward margin" in (root / "output" / "report.html").read_text()

    other = build(root / "sft", "dpo", preferences)
    assert train_here(other, monkeypatch, "dpo.loss_type=sft", "training.max_steps=1") == 0
    rows = run_record(other)["proofs"]["mask"]["rows"]
    assert [row["trained_tokens"] > 0 for row in rows] == [True, False] * 2


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["dpo.label_smoothing=0.1"], "dpo.label_smoothing", "the loss does not know it"),
        (["dpo.loss_type=exo_pair"], "dpo.label_smoothing", "has no value at 0"),
        (["dpo.loss_type=sft", "dpo.beta=0.2"], "dpo.beta", "no reference"),
        (["dpo.loss_type=nca_pair", "dpo.reference_free=true"], "dpo.reference_free", "by itself"),
        (
            ["dpo.reference_free=true", "dpo.precompute_ref_log_probs=true"],
            "dpo.precompute_ref_log_probs",
            "no reference",
        ),
        (
            ["lora.init_lora_weights=pissa", "dpo.precompute_ref_log_probs=false"],
            "dpo.precompute_ref_log_probs",
            "switched off the model is not the reference",
        ),
        (["lora.bias=all", "dpo.precompute_ref_log_probs=false"], "dpo.precompute_ref_log_probs", "biases"),
        (["lora.lora_dropout=0.1"], "lora.lora_dropout", "without dropout"),
        (["training.neftune_noise_alpha=5"], "training.neftune_noise_alpha", "compares log-probabilities"),
        (["dpo.loss_type=kto"], "dpo.loss_type", "expected one of sigmoid"),
        (["dataset.format=messages"], "dataset.format", "cannot be used by the method dpo"),
    ],
)
def test_what_cannot_work_is_refused_in_the_recipe(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe("dpo-lora", overrides=overrides, environ={})
    assert [fault.key for fault in refused.value.faults] == [key]
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "precomputed"),
    [([], False), (["lora=null"], True), (["lora.init_lora_weights=olora"], True), (["lora.bias=lora_only"], True)],
)
def test_how_the_reference_is_had_is_derived(overrides: list[str], precomputed: bool) -> None:
    recipe = load_recipe("dpo-lora", overrides=overrides, environ={}).recipe
    assert recipe.dpo is not None
    assert recipe.dpo.precompute_ref_log_probs is precomputed


@pytest.mark.slow
def test_a_run_from_an_earlier_adapter_begins_at_its_own_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, root = (build(tmp_path / name, "dpo", preferences) for name in ("earlier", "root"))
    assert train_here(earlier, monkeypatch, "training.max_steps=4") == 0
    shutil.copytree(earlier / "output" / "adapter", root / "adapter")
    assert train_here(root, monkeypatch, "lora.from=file:///earlier", "training.max_steps=4", "output.merge=true") == 0
    # Policy and reference are the same model before the first step: the loss is log 2.
    assert losses(root)[0] == pytest.approx(math.log(2), rel=1e-5)
    record = run_record(root)
    assert record["proofs"]["adapter"]["passed"]
    assert record["proofs"]["merged"]["passed"]
    assert not list((root / "output").rglob("ref"))  # no second adapter, in checkpoints neither
