"""A method of one's own, `package.module:function`: the page's example trains; what is wrong with one is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sft_workspace import build, environment, losses, run_record, train_here

from blueprints import JobFailedError, RecipeError, UsageError, load_recipe, overrides_between

METHOD = "my_team.methods:train_with_z_loss"
PAGE = Path(__file__).parents[1] / "docs" / "custom-methods.md"


def example() -> str:
    """The page's Python code."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose recipe names the page's method, which lies on the path."""
    root = build(tmp_path / "workspace")
    package = tmp_path / "code" / "my_team"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "methods.py").write_text(example())
    recipe = (root / "recipe.yaml").read_text().replace("method: sft", f"method: {METHOD}")
    (root / "recipe.yaml").write_text(recipe + "custom: {z_loss: 0.5}\n")
    manifest = root / "dataset" / "_manifest.json"
    manifest.write_text(manifest.read_text().replace('"method": "sft"', f'"method": "{METHOD}"'))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    for name in [name for name in sys.modules if name.startswith("my_team")]:
        monkeypatch.delitem(sys.modules, name)
    return root


def test_the_example_of_the_page_trains_resumes_and_is_proved(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = build(tmp_path / "plain")
    assert train_here(plain, monkeypatch) == 0
    assert train_here(workspace, monkeypatch) == 0
    record = run_record(workspace)
    assert record["status"] == "complete"
    assert record["effective"]["z-loss"] == "0.5"
    assert record["proofs"]["adapter"]["passed"]
    # The penalty is in the loss: (log sum exp)^2 of 84 logits is above 4, half of it counts.
    assert losses(workspace)[0] > losses(plain)[0] + 2
    assert train_here(workspace, monkeypatch) == 0  # complete already


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("custom={z_los: 0.1}", ["no knob 'z_los'", "custom.z_los", "did you mean 'z_loss'?"]),
        ("custom={z_loss: high}", ["'high' is no float", "custom.z_loss"]),
        (
            "method=my_team.methods:train_with_zloss",
            ["no function 'train_with_zloss'", "did you mean 'train_with_z_loss'"],
        ),
        ("method=my_team.method:train", ["no module 'my_team.method'", "PYTHONPATH"]),
    ],
)
def test_what_is_wrong_is_told(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: list[str]
) -> None:
    (workspace / "recipe.yaml").write_text(
        (workspace / "recipe.yaml").read_text().replace("custom: {z_loss: 0.5}\n", "")
    )
    with pytest.raises(UsageError) as caught:
        train_here(workspace, monkeypatch, override)
    for word in words:
        assert word in str(caught.value)


def test_a_module_that_cannot_be_imported_is_no_traceback(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "code" / "my_team" / "methods.py").write_text("import nothing_of_that_name\n")
    code = environment(workspace) | {"PYTHONPATH": f"{tmp_path / 'code'}:{environment(workspace)['PYTHONPATH']}"}
    command = [sys.executable, "-m", "trainers", "--recipe", str(workspace / "recipe.yaml")]
    ended = subprocess.run(command, env=code, cwd=workspace, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "no module 'nothing_of_that_name'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_method_that_makes_nothing_fails(workspace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "code" / "my_team" / "methods.py").write_text("def train_with_z_loss(run):\n    pass\n")
    with pytest.raises(JobFailedError, match="returned without an artifact"):
        train_here(workspace, monkeypatch)


def test_the_grammar_knows_it() -> None:
    base = {"model": "builtin://tiny-llama", "dataset": "builtin://orders"}
    loaded = load_recipe(None, base=base | {"method": "a.b:c", "custom": {"x": {"y": 1}}}, environ={})
    assert loaded.recipe.custom == {"x": {"y": 1}}
    assert loaded.recipe.runtime.name == "llm-custom"
    shipped = load_recipe("sft-lora", environ={}).recipe
    again = load_recipe("sft-lora", overrides=overrides_between(shipped, loaded.recipe), environ={})
    assert again.recipe.hash() == loaded.recipe.hash()
    assert json.dumps(loaded.recipe.model_dump(mode="json"))
    with pytest.raises(RecipeError, match="knobs of the method custom, but the method is sft"):
        load_recipe(None, base=base | {"method": "sft", "custom": {"x": 1}}, environ={})
    with pytest.raises(RecipeError, match=r"expected one of sft, .* or package\.module:function"):
        load_recipe(None, base=base | {"method": "a.b:"}, environ={})
