"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = blocks("python")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    environ = os.environ | {"BLUEPRINTS_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environ.pop("LORA_CONFIG", None)
    result = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environ, text=True, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Complete" in result.stdout
    assert list((tmp_path / "home" / "jobs").glob("*/workspace/output/adapter/adapter_model.safetensors"))


def test_the_recipe_example_is_valid(tmp_path: Path) -> None:
    (recipe,) = blocks("yaml")
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    command = [sys.executable, "-m", "blueprints", "validate", str(tmp_path / "recipe.yaml")]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_two_commands_are_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"quickstart", "test"} <= named <= targets
