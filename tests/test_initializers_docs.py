"""The examples of the documentation are what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from initializers_kit import CHATML_MARKED, ROOT, environment, prepare, recipe_file, run, tiny_model

PAGE = (ROOT / "docs" / "data-formats.md").read_text()
EXAMPLES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE, re.M | re.S))


def test_every_format_has_an_example() -> None:
    assert {name.split(".")[0] for name in EXAMPLES} == {
        "messages",
        "sharegpt",
        "prompt_completion",
        "alpaca",
        "text",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_prepared_as_their_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(EXAMPLES[name])
    prepared = prepare(tmp_path, tmp_path / name, template=CHATML_MARKED)
    assert prepared["format"] == name.split(".")[0]
    assert prepared["splits"]["train"]["trained_tokens"] > 0


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
