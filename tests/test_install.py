"""The light client: installed alone, without torch and transformers, it renders a TrainJob."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "pyarrow")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a fresh environment that holds `pip install llm-blueprints` and nothing else."""
    home = tmp_path_factory.mktemp("client alone")  # with a space, as homes have
    subprocess.run([sys.executable, "-m", "venv", home / "env"], check=True)
    binaries = home / "env" / "bin"
    subprocess.run([binaries / "python", "-m", "pip", "install", "--quiet", ROOT], check=True)
    return binaries


def run(binary: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LORA_CONFIG")}
    return subprocess.run([binary, *args], cwd=cwd, env=environ, text=True, capture_output=True, check=False)


def test_client_alone_renders_a_train_job(client: Path, tmp_path: Path) -> None:
    result = run(client / "blueprints", "render", "sft-lora", "lora.r=4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    job = yaml.safe_load(result.stdout)
    assert job["kind"] == "TrainJob"
    assert re.fullmatch(r"llm-sft-v\d+-\d+", job["spec"]["runtimeRef"]["name"])
    assert "lora.r=4" in job["spec"]["trainer"]["args"]


def test_client_alone_has_no_heavy_library(client: Path, tmp_path: Path) -> None:
    listed = run(client / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path).stdout
    installed = {line.split("==")[0].lower() for line in listed.splitlines()}
    assert installed.isdisjoint(HEAVY)


def test_client_alone_says_what_training_needs(client: Path, tmp_path: Path) -> None:
    result = run(client / "blueprints", "train", "quickstart", cwd=tmp_path)
    assert result.returncode == 5
    assert "pip install 'llm-blueprints[all]'" in result.stderr
    assert "Traceback" not in result.stderr
