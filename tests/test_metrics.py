"""Metrics by their definitions, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from blueprints.errors import UsageError
from trainers.metrics import METRICS, measure


@pytest.mark.parametrize(
    ("name", "answer", "reference", "value"),
    [
        ("exact_match", " a b\n", "a b", 1),
        ("exact_match", "A b", "a b", 0),
        ("contains", "the answer is 42.", "42", 1),
        ("contains", "anything", " ", 0),
        ("numeric_match", "so 3 + 4 = 1,007.0", "#### 1007", 1),
        ("numeric_match", "-5", "5", 0),
        ("numeric_match", "between 3-5", "5", 0),
        ("numeric_match", "no number", "no number", 0),
        ("numeric_match", "it is .5", "0.50", 1),
        ("json_match", '{"b": [1, 2.0], "a": null}', '{ "a":null, "b":[1.0,2] }', 1),
        ("json_match", "[true]", "[1]", 0),
        ("json_match", "not json", "not json", 0),
        ("json_match", '{"a": 1} and more', '{"a": 1}', 0),
        ("token_f1", "The cat sat!", "a cat sat down", 0.8),
        ("token_f1", "x", "y", 0),
        ("token_f1", "the", "", 1),
        ("rouge_l", "police killed the gunman", "police kill the gunman", 0.75),
        ("rouge_l", "the gunman kill police", "police kill the gunman", 0.5),
        ("rouge_l", "", "x", 0),
    ],
)
def test_named_scores(name: str, answer: str, reference: str, value: float) -> None:
    assert METRICS[name](answer, reference) == pytest.approx(value)


def test_a_metric_is_the_mean() -> None:
    found = measure("exact_match", ["p"] * 4, ["a", "b", "c", "d"], ["a", "b", "x", "y"])
    assert found == {"exact_match": 0.5}


def test_functions_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metrics.py").write_text(
        "def shorter(prompts, answers, references):\n"
        "    return [len(answer) < len(prompt) for prompt, answer in zip(prompts, answers)]\n"
        "def whole(prompts, answers, references):\n    return 3\n"
        "def wrong(prompts, answers, references):\n    return {'a': 1}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert measure("own_metrics:shorter", ["long", "x"], ["a", "bb"], ["", ""]) == {"shorter": 0.5}
    assert measure("own_metrics:whole", ["a"], ["b"], ["c"]) == {"whole": 3.0}
    with pytest.raises(UsageError, match="it returned"):
        measure("own_metrics:wrong", ["a", "b"], ["b", "c"], ["c", "d"])
    with pytest.raises(UsageError, match="no function 'nope'"):
        measure("own_metrics:nope", ["a"], ["b"], ["c"])
