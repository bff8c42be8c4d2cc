"""The examples of the documentation are what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from initializers_kit import CHATML_MARKED, ROOT, environment, prepare_for, recipe_file, run, tiny_model

from blueprints.recipe.rows import CUSTOM_FORMATS, FORMATS, KINDS

PAGE = (ROOT / "docs" / "data-formats.md").read_text()
EXAMPLES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE, re.M | re.S))


def test_every_format_has_an_example() -> None:
    assert {re.split(r"[.-]", name)[0] for name in EXAMPLES} == set(CUSTOM_FORMATS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_prepared_as_their_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(EXAMPLES[name])
    wanted = re.split(r"[.-]", name)[0]
    for method in [method for method, usable in FORMATS.items() if wanted in usable]:
        only_prompts = method == "distill" and wanted == "prompt"
        no_prompts = method == "distill" and wanted == "text"
        variant = "distill-student" if only_prompts else "distill-data" if no_prompts else method
        prepared = prepare_for(tmp_path, variant, tmp_path / name, template=CHATML_MARKED)
        assert (prepared["format"], prepared["kind"]) == (wanted, KINDS[method])
        assert prepared["splits"]["train"]["tokens"] > 0


def test_the_message_of_the_page_is_the_real_one(tmp_path: Path) -> None:
    rows = [
        '{"messages": [{"role": "usr", "content": "q"}, {"role": "assistant", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": 5}]}',
        '{"messages": [}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    tiny_model(tmp_path / "work" / "model")
    done = run("dataset", environment(tmp_path / "work", tmp_path / "rows.jsonl", recipe=recipe_file(tmp_path)))
    block = re.search(r"^```text\n(error: data set.*?)^```", PAGE, re.M | re.S)
    assert block
    assert done.stderr.replace(f"file://{tmp_path}", "file:///data") == block[1]
    assert done.returncode == 3
