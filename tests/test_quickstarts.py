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


def train(recipe: str, home: Path) -> dict[str, Any]:
    """`blueprints train RECIPE`, all steps included; returns `run.json`."""
    environment = os.environ | {"BLUEPRINTS_HOME": str(home), "OMP_NUM_THREADS": "2"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "blueprints", "train", recipe, "--name", "quick"],
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
