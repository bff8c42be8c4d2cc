"""Every quickstart shows on held-out rows that it has learnt, through the real command and within four minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
MOST_SECONDS = 240


def train(recipe: str, home: Path, *overrides: str) -> dict[str, Any]:
    """`blueprints train RECIPE`, all steps included; returns `run.json`."""
    environment = os.environ | {"BLUEPRINTS_HOME": str(home), "OMP_NUM_THREADS": "2"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "blueprints", "train", recipe, *overrides, "--name", "quick"],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert time.monotonic() - began < MOST_SECONDS
    record: dict[str, Any] = json.loads((home / "jobs" / "quick" / "workspace" / "output" / "run.json").read_text())
    return record


def test_dpo_prefers_the_chosen_answers(tmp_path: Path) -> None:
    metrics = train("quickstart-dpo", tmp_path)["metrics"]
    assert 0.4 < metrics["preference_accuracy_before"] < 0.6
    assert metrics["preference_accuracy_after"] >= 0.9


def test_distillation_closes_the_gap_to_the_teacher(tmp_path: Path) -> None:
    metrics = train("quickstart-distill", tmp_path)["metrics"]
    assert metrics["teacher_exact_match"] - metrics["exact_match_before"] > 0.9
    assert metrics["teacher_gap_closed"] >= 0.5
    assert metrics["teacher_kl_after"] < 0.5 * metrics["teacher_kl_before"]


def test_distillation_from_stored_scores_closes_it_too(tmp_path: Path) -> None:
    stored = ("distill.teacher_top_k=16", "distill.lmbda=0", "distill.max_completion_length=null")
    record = train("quickstart-distill", tmp_path, *stored)
    assert record["metrics"]["teacher_gap_closed"] >= 0.5
    assert "the model is not loaded" in record["effective"]["teacher"]
    assert (tmp_path / "jobs" / "quick" / "logs" / "teacher.log").read_text()


def test_distillation_on_prompts_alone_closes_it_too(tmp_path: Path) -> None:
    rows = Path(__file__).parents[1] / "initializers" / "builtin" / "data" / "orders"
    for split in ("train", "test"):
        lines = (rows / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [{"prompt": json.loads(line)["messages"][:1]} for line in lines]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    changed = (f"dataset.uri=file://{tmp_path}", "distill.lmbda=1.0", "training.max_steps=80", "eval.max_rows=50")
    metrics = train("quickstart-distill", tmp_path / "home", *changed)["metrics"]
    assert metrics["teacher_exact_match"] == 1  # its own answers are the references
    assert metrics["teacher_gap_closed"] >= 0.5


def test_ppo_earns_a_higher_reward(tmp_path: Path) -> None:
    metrics = train("quickstart-ppo", tmp_path)["metrics"]
    assert 0.3 < metrics["reward_before"] < 0.5
    assert metrics["reward_after"] >= metrics["reward_before"] + 0.4


def test_qat_wins_back_what_quantisation_loses(tmp_path: Path) -> None:
    found = train("quickstart-qat", tmp_path)["quantization"]
    assert found["post_training"] > found["full_precision"] + 0.1
    assert found["recovered"] >= 0.5
