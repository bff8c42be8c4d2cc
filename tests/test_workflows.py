"""The workflows of continuous integration are well-formed, pinned, and call what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
STEP = {"name", "uses", "with", "run", "if", "env", "working-directory", "shell", "id", "timeout-minutes"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_well_formed(path: Path) -> None:
    workflow = read(path)
    assert workflow["name"]
    assert workflow[True]  # `on`, as YAML 1.1 reads it
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert set(step) <= STEP
            assert ("run" in step) != ("uses" in step)
            assert re.search(r"@v\d", step.get("uses", "@v1"))
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in TARGETS
            for script in re.findall(r"^(\.ci/\S+)", step.get("run", "")):
                assert (ROOT / script).is_file()


def test_make_test_is_run() -> None:
    runs = [step.get("run", "") for path in WORKFLOWS for job in read(path)["jobs"].values() for step in job["steps"]]
    assert any("make test" in run or ".ci/run" in run for run in runs)
    assert "make test-cluster" in runs


def test_the_cluster_is_that_of_the_documentation() -> None:
    versions = read(ROOT / ".github/workflows/cluster.yaml")["env"]
    assert versions["TRAINER_VERSION"] == "v2.3.0"
    assert versions["JOBSET_VERSION"] == "v0.12.0"
    assert re.fullmatch(r"kindest/node:v1\.\d+\.\d+@sha256:[0-9a-f]{64}", versions["KIND_NODE_IMAGE"])
