"""What distillation computes: the divergences of arXiv:2306.13649, stored scores, and the curves of TRL's own trainers."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_workspace import build, score_here
from sft_workspace import losses, raw_rows, run_record, tokenised, train_here

from trainers.divergence import distance, top_k

RATE = "training.learning_rate=1.0e-3"
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def plain_divergence(student: list[float], teacher: list[float], beta: float, temperature: float) -> float:
    """Equations 1 and 2 of the paper, number by number in double precision."""

    def softmax(logits: list[float]) -> list[float]:
        weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
        return [weight / sum(weights) for weight in weights]

    def kl(first: list[float], second: list[float]) -> float:
        return sum(p * math.log(p / q) for p, q in zip(first, second, strict=True))

    p, q = softmax(teacher), softmax(student)
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def logits(positions: int = 7, size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    student, teacher = (3 * torch.randn(positions, size, generator=generator) for _ in range(2))
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_the_divergence_is_that_of_the_paper(beta: float, temperature: float) -> None:
    student, teacher = logits()
    found, forward, same = distance(student, teacher, beta=beta, temperature=temperature)
    pairs = list(zip(student.tolist(), teacher.tolist(), strict=True))
    expected = [plain_divergence(ours, theirs, beta, temperature) for ours, theirs in pairs]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert forward.tolist() == pytest.approx([plain_divergence(*pair, 0.0, temperature) for pair in pairs], rel=1e-5)
    assert same.tolist() == [ours.index(max(ours)) == theirs.index(max(theirs)) for ours, theirs in pairs]


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_is_that_of_the_divergence(beta: float) -> None:
    student, teacher = logits(positions=2, size=5)
    distance(student, teacher, beta=beta, temperature=0.8)[0].sum().backward()
    step = 1e-4
    for position in range(2):
        for token in range(5):
            values = []
            for sign in (1, -1):
                moved = student[position].tolist()
                moved[token] += sign * step
                values.append(plain_divergence(moved, teacher[position].tolist(), beta, 0.8))
            assert student.grad is not None
            assert student.grad[position, token].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-4)


@pytest.mark.parametrize("beta", BETAS)
def test_stored_scores_of_all_tokens_give_the_whole_divergence(beta: float) -> None:
    student, teacher = logits()
    whole, forward, same = distance(student, teacher, beta=beta, temperature=0.9)
    for k in (10, 11, 500):  # with all but one token, the rest is that one
        found = distance(student, top_k(teacher, k, 0.9), beta=beta, temperature=0.9)
        for ours, expected in zip(found, (whole, forward, same), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 3])
def test_stored_scores_compare_the_likeliest_tokens_and_the_rest_as_one(beta: float, k: int) -> None:
    student, teacher = logits()
    found = distance(student, top_k(teacher, k, 0.9), beta=beta, temperature=0.9)[0]
    for position, (ours, theirs) in enumerate(zip(student.tolist(), teacher.tolist(), strict=True)):
        kept = sorted(range(len(theirs)), key=lambda token: -theirs[token])[:k]
        merged = []
        for row in (ours, theirs):
            inside = [row[token] / 0.9 for token in kept]
            outside = math.log(sum(math.exp(row[token] / 0.9) for token in range(len(row)) if token not in kept))
            merged.append([*inside, outside])
        assert found[position].item() == pytest.approx(plain_divergence(*merged, beta, 1.0), rel=1e-4)


def test_more_stored_tokens_come_closer_to_the_whole_divergence_from_below() -> None:
    student, teacher = logits(positions=30, size=40)
    whole = distance(student, teacher, beta=0.5, temperature=1.0)[0].mean().item()
    found = [
        distance(student, top_k(teacher, k, 1.0), beta=0.5, temperature=1.0)[0].mean().item() for k in (1, 4, 16, 39)
    ]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(whole, rel=1e-5)


def test_many_positions_are_computed_in_parts_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = logits(positions=50)
    whole = distance(student, teacher, beta=0.5, temperature=0.9)[0]
    (first,) = torch.autograd.grad(whole.sum(), student)
    monkeypatch.setattr("trainers.divergence.CHUNK", 7)
    parts = distance(student, teacher, beta=0.5, temperature=0.9)[0]
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts.sum(), student)[0], first)


def test_impossible_tokens_are_no_accident() -> None:
    student, teacher = logits()
    masked = torch.zeros_like(teacher)
    masked[:, -2:] = -math.inf  # as models do with the padding of their vocabulary
    for beta in BETAS:
        for target in (teacher + masked, top_k(teacher + masked, 9, 1.0), top_k(teacher + masked, 10, 1.0)):
            found = distance(student + masked, target, beta=beta, temperature=1.0)[0]
            assert torch.isfinite(found).all()
            (gradient,) = torch.autograd.grad(found.sum(), student)
            assert torch.isfinite(gradient).all()


# --- against TRL ---------------------------------------------------------------------------------------------------


def trl_arguments(root: Path) -> dict[str, Any]:
    return {
        "output_dir": str(root / "plain"), "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 6,
        "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "logging_steps": 1, "seed": 42, "use_cpu": True,
        "bf16": False, "activation_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("beta", "lora"),
    [(0.3, False), pytest.param(0.0, True, marks=pytest.mark.slow), pytest.param(1.0, True, marks=pytest.mark.slow)],
)
def test_off_policy_losses_equal_trls_gkd(
    beta: float, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    root = build(tmp_path, lmbda=0)
    # GKDTrainer leaves the temperature out of its loss.
    settings = ("distill.temperature=1.0", f"distill.beta={beta}", "training.max_steps=6", "eval.metric=none", RATE)
    assert train_here(root, monkeypatch, *settings, *([] if lora else ["lora=null"])) == 0
    tokenizer = AutoTokenizer.from_pretrained(root / "model")

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["ids"]) for row in rows)
        batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for row in rows:
            rest = width - len(row["ids"])
            batch["input_ids"].append(row["ids"] + [0] * rest)
            batch["attention_mask"].append([1] * len(row["ids"]) + [0] * rest)
            labels = [token if on else -100 for token, on in zip(row["ids"], row["mask"], strict=True)]
            batch["labels"].append(labels + [-100] * rest)
        tensors = {name: torch.tensor(value) for name, value in batch.items()}
        return tensors | {"prompts": tensors["input_ids"], "prompt_attention_mask": tensors["attention_mask"]}

    rows = [{"ids": ids, "mask": mask} for ids, mask in tokenised(raw_rows(40, 1), tokenizer)]
    monkeypatch.setattr(random, "random", lambda: 0.5)  # at 0.0 it would sample even with lmbda 0
    plain = GKDTrainer(
        model=str(root / "model"),
        teacher_model=AutoModelForCausalLM.from_pretrained(root / "teacher"),
        args=GKDConfig(**trl_arguments(root), lmbda=0.0, beta=beta, temperature=1.0),
        data_collator=collate,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapter() if lora else None,
    )
    plain.train()
    expected = [line["loss"] for line in plain.state.log_history if "loss" in line]
    assert len(expected) == 6
    assert losses(root) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("beta", "accumulation"),
    [(0.5, 2), pytest.param(0.0, 1, marks=pytest.mark.slow), pytest.param(1.0, 1, marks=pytest.mark.slow)],
)
def test_on_policy_losses_equal_trls_distillation(
    beta: float, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, GenerationMixin
    from trl import DistillationConfig, DistillationTrainer

    generate = GenerationMixin.generate

    def greedy(self: Any, *args: Any, generation_config: Any, **others: Any) -> Any:
        # The two trainers draw their samples in another order: both answer greedily here.
        generation_config.do_sample, generation_config.temperature = False, 1.0
        return generate(self, *args, generation_config=generation_config, **others)

    monkeypatch.setattr(GenerationMixin, "generate", greedy)
    # Every step sees all rows, so that their order does not matter.
    root = build(tmp_path, lmbda=1, prompts_alone=True)
    settings = (
        f"distill.beta={beta}", "distill.temperature=0.8", "training.max_steps=6", "eval.metric=none", RATE,
        f"training.per_device_train_batch_size={40 // accumulation}",
        f"training.gradient_accumulation_steps={accumulation}", "lora=null",
    )  # fmt: skip
    assert train_here(root, monkeypatch, *settings) == 0
    arguments = trl_arguments(root) | {
        "per_device_train_batch_size": 40 // accumulation, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    plain = DistillationTrainer(
        model=str(root / "model"),
        teacher_model=str(root / "teacher"),
        args=DistillationConfig(**arguments, beta=beta, temperature=0.8, max_completion_length=8),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in raw_rows(40, 1)]),
        processing_class=AutoTokenizer.from_pretrained(root / "model"),
    )
    plain.train()
    expected = [line["loss"] for line in plain.state.log_history if "loss" in line]
    assert len(expected) == 6
    assert losses(root) == pytest.approx(expected, rel=1e-5)


# --- stored scores in training -------------------------------------------------------------------------------------


def test_training_on_all_stored_tokens_equals_training_beside_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, stored = build(tmp_path / "beside", lmbda=0), build(tmp_path / "stored", lmbda=0)
    assert train_here(beside, monkeypatch) == 0
    score_here(stored, monkeypatch, "distill.teacher_top_k=84")
    (stored / "teacher" / "model.safetensors").unlink()  # training must not look for it
    assert train_here(stored, monkeypatch, "distill.teacher_top_k=84") == 0
    assert losses(stored) == pytest.approx(losses(beside), rel=1e-5)
    first, second = run_record(beside)["metrics"], run_record(stored)["metrics"]
    for name in ("teacher_kl_before", "teacher_kl_after", "nll_after", "teacher_nll", "eval_loss_after"):
        assert second[name] == pytest.approx(first[name], rel=1e-5)
