"""The artifact proof finds what is wrong with a saved artifact; the report needs nothing but itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sft_workspace import build, environment, train_here


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete run with adapter and merged model; the prompts hold what HTML must not swallow."""
    root = build(tmp_path)
    assert train_here(root, monkeypatch, "output.merge=true", "training.eval_steps=2") == 0
    return root


def prove(root: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """Run the proof again, as anyone can."""
    return subprocess.run(
        [sys.executable, "-m", "trainers.prove", str(root / "output" / "proof" / f"{kind}.json")],
        env=environment(root), cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def test_proofs_can_be_repeated_and_tell_tampering(finished: Path) -> None:
    weights = finished / "output" / "adapter" / "adapter_model.safetensors"
    whole = load_file(weights)
    assert prove(finished, "adapter").returncode == 0

    save_file({name: tensor * 0 for name, tensor in whole.items()}, weights, metadata={"format": "pt"})
    zeroed = prove(finished, "adapter")
    assert zeroed.returncode == 4
    assert "weights not as trained" in zeroed.stdout

    save_file(dict(list(whole.items())[2:]), weights, metadata={"format": "pt"})
    missing = prove(finished, "adapter")
    assert missing.returncode == 4
    assert "missing weights" in missing.stdout

    merged = finished / "output" / "model" / "model.safetensors"
    tensors = load_file(merged)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    save_file(tensors | {name: tensors[name] * 1.5}, merged, metadata={"format": "pt"})
    changed = prove(finished, "merged")
    assert changed.returncode == 4
    assert "logits differ" in changed.stdout


def test_the_report_is_one_file_that_loads_nothing(finished: Path) -> None:
    page = (finished / "output" / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|<script|<link|<iframe", page)
    assert page.count("<polyline") >= 4
    for words in ("Answers before and after", "fingerprint", "peak memory", "proof", "recipe.yaml"):
        assert words in page
    assert "&lt;eos&gt;" in page
    assert "<eos>" not in page


def test_a_failed_proof_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blueprints.errors import JobFailedError
    from trainers import run

    root = build(tmp_path)
    save = run.save_artifact

    def zeroed(*args: object) -> Path:
        target = save(*args)
        path = target / "adapter_model.safetensors"
        save_file({name: tensor * 0 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
        return target

    monkeypatch.setattr(run, "save_artifact", zeroed)
    with pytest.raises(JobFailedError, match="weights not as trained"):
        train_here(root, monkeypatch)
    record = json.loads((root / "output" / "run.json").read_text())
    assert record["status"] == "failed"
    assert record["error"]["exit_code"] == 4
    assert json.loads((root / "output" / "proof.json").read_text())["adapter"]["passed"] is False
