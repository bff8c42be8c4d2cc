"""Every method under every strategy: two processes learn what one learns with the same batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import distill_workspace
import methods_kit
import pytest
from methods_kit import TUNINGS
from sft_workspace import losses, run_record, train

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
BOTH = ("resources.num_proc_per_node=2", "training.per_device_train_batch_size=2")
EVAL = "eval: {max_new_tokens: 8, samples: 3}\n"


def dpo(root: Path) -> Path:
    return methods_kit.build(root, "dpo", methods_kit.preferences, EVAL)


def qat(root: Path) -> Path:
    # Sums in another order round some weight the other way: with steps of 8 bits that is little.
    return methods_kit.build(
        root, "qat", methods_kit.supervised, f"qat: {{group_size: 16, base_config: int8_weight_only}}\n{EVAL}"
    )


def distill(root: Path) -> Path:
    return distill_workspace.build(root, lmbda=0)  # answers that are sampled depend on who samples them


def ppo(root: Path) -> Path:
    options = "ppo: {reward_funcs: [{name: length, args: {max: 3}}], max_completion_length: 8, num_ppo_epochs: 2}\n"
    return methods_kit.build(root, "ppo", methods_kit.prompts, options + EVAL)


def grpo(root: Path) -> Path:
    rewards = "[{name: regex, args: {pattern: 'w[0-9]'}}, {name: length, args: {max: 4}, weight: 0.5}]"
    block = f"grpo: {{num_generations: 4, max_completion_length: 8, beta: 0.1, reward_funcs: {rewards}}}\n"
    return methods_kit.build(root, "grpo", methods_kit.prompts, block + EVAL)


BUILD: dict[str, Callable[[Path], Path]] = {"dpo": dpo, "distill": distill, "ppo": ppo, "grpo": grpo, "qat": qat}
"""A small workspace by method. SFT has tests of its own."""
MATRIX = [
    pytest.param(
        method,
        strategy,
        tuning,
        marks=pytest.mark.covers(method=method, tuning=tuning, world=strategy, feature=["train", "eval"]),
        id=f"{method}-{strategy}-{tuning}",
    )
    for method in BUILD
    for strategy in STRATEGIES
    for tuning in ("full", "lora", "qlora")
    if not (tuning == "qlora" and (method == "qat" or strategy in ("fsdp", "zero3")))
    and (method, strategy) != ("ppo", "fsdp")
    and (method, strategy, tuning) != ("qat", "fsdp", "lora")  # refused by the recipe
]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[float]]:
    """Losses of one process by method and tuning."""
    known: dict[tuple[str, str], list[float]] = {}

    def losses_of(method: str, tuning: str) -> list[float]:
        if (method, tuning) not in known:
            root = BUILD[method](tmp_path_factory.mktemp(f"{method}-{tuning}"))
            done = train(root, *TUNINGS[tuning])
            assert done.returncode == 0, done.stdout
            known[method, tuning] = losses(root)
        return known[method, tuning]

    return losses_of


@pytest.mark.slow
@pytest.mark.parametrize(("method", "strategy", "tuning"), MATRIX)
def test_every_method_under_every_strategy(
    method: str, strategy: str, tuning: str, alone: Callable[[str, str], list[float]], tmp_path: Path
) -> None:
    root = BUILD[method](tmp_path)
    overrides = (*BOTH, *TUNINGS[tuning], f"resources.strategy={strategy}")
    done = train(root, *overrides, processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    record: dict[str, Any] = run_record(root)
    assert record["effective"]["strategy"] == strategy
    assert record["proofs"]["model" if tuning == "full" else "adapter"]["passed"]
    assert losses(root) == pytest.approx(alone(method, tuning), rel=1e-3 if method == "qat" else 1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_student_that_is_shared_answers_prompts(strategy: str, tmp_path: Path) -> None:
    root = distill_workspace.build(tmp_path, lmbda=1, prompts_alone=True)
    overrides = (*BOTH, f"resources.strategy={strategy}", "lora=null", "training.max_steps=6")
    done = train(root, *overrides, processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    metrics = run_record(root)["metrics"]
    assert methods_kit.curve(root, "on_policy") == [1.0] * 6
    assert metrics["teacher_kl_after"] < metrics["teacher_kl_before"]
