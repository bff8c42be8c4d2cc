"""`blueprints eval` compares base and tuned model; both halves, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sft_workspace import ROOT, build, run_record, train_here

from blueprints.cli import main
from blueprints.recipe.write import recipe_text


def request(root: Path, **other: Any) -> Path:
    """What the command line asks of `trainers.evaluation`, on the held-out rows of a workspace."""
    from blueprints.recipe.schema import Recipe

    recipe = Recipe.model_validate(
        {key: value for key, value in run_record(root)["recipe"].items() if value is not None}
    )
    (root / "eval.yaml").write_text(recipe_text(recipe))
    asked = {
        "output": str(root / "output"), "model": str(root / "model"), "dataset": str(root / "dataset"),
        "recipe": str(root / "eval.yaml"), "metrics": ["exact_match", "token_f1"], "max_rows": 200,
        "max_new_tokens": 8, "batch_size": 5, "samples": 3, "tasks": [], "result": str(root / "result.json"),
    }  # fmt: skip
    (root / "request.json").write_text(json.dumps(asked | other))
    return root / "request.json"


@pytest.mark.covers(method="sft", tuning=["lora", "full"], world="1 process", feature="eval")
@pytest.mark.parametrize("how", [("lora.r=4",), pytest.param(("lora=null",), marks=pytest.mark.slow)])
def test_a_finished_run_is_measured_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    from trainers.evaluation import main as evaluate

    root = build(tmp_path)
    assert train_here(root, monkeypatch, *how) == 0
    assert evaluate(request(root)) == 0
    found = json.loads((root / "result.json").read_text())
    metrics = run_record(root)["metrics"]
    for when, was in (("base", "before"), ("tuned", "after")):
        assert found[when]["eval_loss"] == pytest.approx(
            metrics[f"eval_loss_{was}"], rel=1e-2
        )  # there averaged by batches
        assert found[when]["exact_match"] == metrics[f"exact_match_{was}"]
        assert 0 <= found[when]["token_f1"] <= 1
    assert found["rows"] == 12
    assert set(found["samples"][0]) == {"prompt", "reference", "base", "tuned"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--metric", "exact"], "no metric 'exact'"),
        (["--tasks", "x"], "--tasks needs --harness"),
        (["--harness", "lm_eval"], "--harness needs --tasks"),
        (["--split", "test"], "--split needs --dataset"),
        (["--harness", "lm_eval", "--tasks", "x", "--metric", "exact_match"], "rows and metrics of its own"),
        (["--dataset", "s4://a"], "`s4://` is not supported"),
        (["--max-rows", "0"], "--max-rows"),
        ([], "no job named 'nothing'"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    monkeypatch.setenv("BLUEPRINTS_HOME", str(tmp_path))
    assert main(["eval", "nothing", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_on_rows_of_ones_own(tmp_path: Path) -> None:
    environment = os.environ | {"BLUEPRINTS_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}

    def blueprints(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "blueprints", *words], env=environment, capture_output=True, text=True, check=False
        )

    done = blueprints("train", "quickstart", "--name", "q", "training.max_steps=8", "eval.max_rows=8")
    assert done.returncode == 0, done.stderr
    rows = [{"prompt": "Say yes.", "completion": "yes"}, {"prompt": "Say no.", "completion": "no"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = blueprints("eval", "q", "--dataset", f"file://{tmp_path}/rows.jsonl", "--metric", "contains")
    assert shown.returncode == 0, shown.stderr
    assert "q on 2 rows of file://" in shown.stdout
    assert "contains the reference" in shown.stdout
    as_json = blueprints("eval", "q", "--max-rows", "5", "--json")
    found = json.loads(as_json.stdout)
    assert (found["rows"], found["source"]) == (5, "builtin://orders")
    assert Path(found["result"]).is_file()
    wrong = blueprints("eval", "q", "--dataset", f"file://{tmp_path}/none.jsonl")
    assert wrong.returncode == 2
    harness = blueprints("eval", "q", "--harness", "lm_eval", "--tasks", "hellaswag")
    assert harness.returncode == 5
    assert "pip install lm_eval" in harness.stderr
