"""Rewards: what those with a name give, what is asked of one's own, and what a recipe may say of them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from blueprints.errors import RecipeError, UsageError
from blueprints.recipe import load_recipe
from blueprints.recipe.rewards import REWARDS, shown_names
from blueprints.recipe.schema import RewardFunction
from trainers.rewards import NAMED, Reward, load_rewards, numbers_in, total

ROOT = Path(__file__).parents[1]


def score(
    name: str, completion: Any, row: dict[str, Any] | None = None, ids: list[int] | None = None, **args: Any
) -> Any:
    """What the reward `name` gives for one completion."""
    reward = load_rewards([RewardFunction(name=name, args=args)], "grpo.reward_funcs")[0]
    return reward(["p"], [completion], [ids or []], [row or {}])[0]


@pytest.mark.parametrize(
    ("name", "completion", "args", "row", "expected"),
    [
        ("exact_match", " 12\n", {}, {"answer": "12"}, 1.0),
        ("exact_match", "12", {}, {"answer": 12}, 1.0),
        ("exact_match", "12.", {}, {"answer": "12"}, 0.0),
        ("exact_match", "PARIS", {}, {"answer": "Paris"}, 0.0),
        ("exact_match", "PARIS", {"ignore_case": True}, {"answer": "Paris"}, 1.0),
        ("exact_match", "b", {"column": "right"}, {"right": ["a", "b"]}, 1.0),
        ("exact_match", "b", {}, {"other": "b"}, None),
        ("exact_match", "None", {}, {"answer": None}, None),
        ("numeric_match", "so 3 + 4 = 7", {}, {"answer": "7"}, 1.0),
        ("numeric_match", "7, not 8", {}, {"answer": "7"}, 0.0),
        ("numeric_match", "7, not 8", {"which": "first"}, {"answer": "7"}, 1.0),
        ("numeric_match", "7, not 8", {"which": "any"}, {"answer": 7}, 1.0),
        ("numeric_match", "it costs $1,234.50.", {}, {"answer": "1234.5"}, 1.0),
        ("numeric_match", r"\boxed{-3}", {}, {"answer": "first 9, then #### -3"}, 1.0),
        ("numeric_match", "0.30000000000000004", {}, {"answer": "0.3"}, 1.0),
        ("numeric_match", "3.1", {"tolerance": 0.05}, {"answer": "3.14"}, 1.0),
        ("numeric_match", "no idea", {}, {"answer": "3"}, 0.0),
        ("numeric_match", "3", {}, {"answer": "three"}, None),
        ("regex", "the answer is 42", {"pattern": r"\d+"}, {}, 1.0),
        ("regex", "the answer is 42", {"pattern": r"\d+", "mode": "fullmatch"}, {}, 0.0),
        ("regex", " 42\n", {"pattern": r"\d+", "mode": "fullmatch"}, {}, 1.0),
        ("json_schema", '{"a": 1}', {}, {}, 1.0),
        ("json_schema", '{"a": 1', {}, {}, 0.0),
        ("json_schema", "NaN", {}, {}, 0.0),
        ("json_schema", '{"a": "x"}', {"schema": {"properties": {"a": {"type": "integer"}}}}, {}, 0.0),
        ("json_schema", "[]", {"schema": {"type": "object"}, "valid_json": 0.25}, {}, 0.25),
        ("json_schema", '{"a": 3}', {"schema": {"type": "object", "required": ["a"]}, "valid_json": 0.25}, {}, 1.0),
        ("json_schema", "[1]", {"schema": {"items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "null"}}}}, {}, 0.0),
        ("format", "<think>a\nb</think>\n<answer>4</answer>", {"tags": ["think", "answer"]}, {}, 1.0),
        ("format", "<think>a</think> so <answer>4</answer>", {"tags": ["think", "answer"]}, {}, 0.0),
        ("format", "<answer>4</answer><think>a</think>", {"tags": ["think", "answer"]}, {}, 0.0),
        ("format", "<answer>4</answer><answer>5</answer>", {"tags": ["answer"]}, {}, 0.0),
        ("length", "one two", {"min": 2, "max": 3, "unit": "words"}, {}, 1.0),
        ("length", "one", {"min": 2, "unit": "words"}, {}, 0.5),
        ("length", "abcdef", {"max": 4, "unit": "characters"}, {}, 0.5),
        ("length", "abcdefghij", {"max": 4, "unit": "characters"}, {}, 0.0),
    ],
)  # fmt: skip
def test_named_rewards(name: str, completion: str, args: dict[str, Any], row: dict[str, Any], expected: Any) -> None:
    assert score(name, completion, row, **args) == expected
    message = [{"role": "assistant", "content": completion}]
    assert score(name, message, row, **args) == expected, "a completion as messages counts as its text does"


def test_length_counts_tokens_by_default() -> None:
    assert score("length", "whatever", ids=[5, 6, 7], max=3) == 1.0
    assert score("length", "whatever", ids=[5, 6, 7, 8], max=3) == pytest.approx(2 / 3)


def test_numbers_are_read_as_people_write_them() -> None:
    text = "1,234,567.5 and -2, +3; .5 or 1e3: 10-4 v2 3.2.1 (7) 50% 1,2"
    assert numbers_in(text) == [1234567.5, -2, 3, 0.5, 1000, 10, 4, 3.2, 7, 50, 1, 2]


def test_every_named_reward_has_a_function_and_is_documented() -> None:
    assert set(NAMED) == set(REWARDS)
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    for name, known in REWARDS.items():
        assert f"`{name}`" in page
        for argument in known.arguments:
            assert f"`{argument}`" in page, f"{name}: {argument}"


def test_a_weighted_sum_leaves_out_what_does_not_apply() -> None:
    specs = [
        RewardFunction(name="exact_match", weight=2.0),
        RewardFunction(name="length", weight=-0.5, args={"max": 9}),
    ]
    rewards = load_rewards(specs, "ppo.reward_funcs")
    assert total(rewards, [[1.0, 0.0, None], [1.0, None, None]]) == [1.5, 0.0, None]


def test_names_in_curves_are_short_and_differ() -> None:
    specs = [RewardFunction(name=name) for name in ("regex", "a.b:nice", "regex", "c:nice")]
    assert shown_names(specs) == ["regex", "nice", "regex_2", "nice_2"]


# --- functions of one's own ----------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module with a function `f` and gives the reward of it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source: str, **args: Any) -> tuple[Reward, Path]:
        path = tmp_path / f"own_{random.randrange(10**12)}.py"
        path.write_text(source)
        spec = RewardFunction(name=f"{path.stem}:f", args=args)
        return load_rewards([spec], "grpo.reward_funcs")[0], path

    return make


def call(reward: Reward, completions: list[Any], columns: list[dict[str, Any]] | None = None) -> list[float | None]:
    rows = columns or [{} for _ in completions]
    return reward([f"p{i}" for i in range(len(rows))], completions, [[1]] * len(rows), rows, trainer_state="state")


def test_own_function_gets_everything_by_keyword(own: Any) -> None:
    source = """
def f(prompts, completions, completion_ids, label, bonus=0, **kwargs):
    assert kwargs["other"] == [None, "o"] and kwargs["trainer_state"] == "state", kwargs
    return [len(c) + bonus + (1 if l == "x" else 0) for c, l in zip(completions, label)]
"""
    reward, _ = own(source, bonus=10)
    reward.check({"label", "other"})
    assert call(reward, ["ab", "c"], [{"label": "x"}, {"label": "y", "other": "o"}]) == [13.0, 11.0]


def test_own_function_without_kwargs_gets_what_it_names(own: Any) -> None:
    reward, _ = own("def f(completions):\n    return [True, None]")
    reward.check({"label"})
    assert call(reward, ["a", "b"]) == [1.0, None]


def test_async_functions_and_arrays_are_taken(own: Any) -> None:
    assert call(own("async def f(completions, **_):\n    return [1, 2]")[0], ["a", "b"]) == [1.0, 2.0]
    numpy = "import numpy as np\ndef f(completions, **_):\n    return np.array([0.5, 1], dtype=np.float32)"
    assert call(own(numpy)[0], ["a", "b"]) == [0.5, 1.0]
    torch = "import torch\ndef f(completions, **_):\n    return [torch.tensor(0.25), torch.tensor([2])]"
    assert call(own(torch)[0], ["a", "b"]) == [0.25, 2.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1.0]", "returned 1 numbers for 2 completions"),
        ("return 1.0", "returned 1.0, a float"),
        ("return None", "returned None, a NoneType"),
        ("return [1.0, float('nan')]", "returned nan for the completion 'bb' of the prompt 'p1'"),
        ("return [float('-inf'), 0]", "returned -inf for the completion 'aa' of the prompt 'p0'"),
        ("return ['1', 0]", "returned '1', a str, for the completion 'aa'"),
        ("return {0: 1.0, 1: 1.0}", "a dict"),
        ("return [completions[0]['content'], 0]", "raised TypeError"),
        ("raise KeyError('gold')", "raised KeyError: 'gold'"),
    ],
)
def test_what_a_function_may_not_return(own: Any, body: str, said: str) -> None:
    reward, path = own(f"def f(completions, **kwargs):\n    {body}\n")
    with pytest.raises(UsageError, match=said.replace("(", r"\(")) as caught:
        call(reward, ["aa", "bb"])
    line = 2 if "raised" in said else 1
    assert caught.value.where == f"{path}:{line}"
    assert caught.value.exit_code == 2


def test_an_error_deep_in_a_library_points_at_the_users_line(own: Any) -> None:
    reward, path = own(
        "import json\ndef f(completions, **_):\n    x = 1\n    return [json.loads(c) for c in completions]"
    )
    with pytest.raises(UsageError, match="JSONDecodeError") as caught:
        call(reward, ["{"])
    assert caught.value.where == f"{path}:4"
    assert "each a text" in caught.value.todo
    assert "'{'" in caught.value.todo


def test_what_a_signature_cannot_be_given_is_refused_before_training(own: Any) -> None:
    with pytest.raises(UsageError, match="needs a parameter 'gold', which is neither a column of the rows"):
        own("def f(completions, gold):\n    return []")[0].check({"answer"})
    with pytest.raises(UsageError, match="takes no argument 'bonsu'") as caught:
        own("def f(completions, bonus=1):\n    return []", bonsu=2)[0].check({"answer"})
    assert "Did you mean `bonus`?" in caught.value.todo


def test_functions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no module 'no_such_module'") as caught:
        load_rewards([RewardFunction(name="no_such_module:f")], "grpo.reward_funcs")
    assert "grpo.reward_funcs[0].name" in caught.value.where
    with pytest.raises(UsageError, match="has no function 'sqqrt'"):
        load_rewards([RewardFunction(name="math:sqqrt")], "grpo.reward_funcs")
    assert math.sqrt(4) == 2


# --- what a recipe may say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "key", "said"),
    [
        ("{name: exactmatch}", "name", "Did you mean `exact_match`?"),
        ("{name: 'my module:f'}", "name", "package.module:function"),
        ("{name: exact_match, args: {colum: a}}", "args.colum", "Did you mean `column`?"),
        ("{name: exact_match, args: {ignore_case: 1}}", "args.ignore_case", "a boolean"),
        ("{name: regex}", "args.pattern", "required, but missing"),
        ("{name: regex, args: {pattern: '('}}", "args.pattern", "no regular expression"),
        ("{name: regex, args: {pattern: a, mode: full}}", "args.mode", "`search` or `fullmatch`"),
        ("{name: json_schema, args: {schema: {type: strng}}}", "args.schema", "not a JSON schema: 'strng'"),
        ("{name: json_schema, args: {schema: text}}", "args.schema", "as a map"),
        ("{name: json_schema, args: {schema: {items: {$ref: 'http://a.b/c'}}}}", "args.schema", "leads to no part"),
        ("{name: json_schema, args: {valid_json: 2}}", "args.valid_json", "a number from 0 to 1"),
        ("{name: format, args: {tags: []}}", "args.tags", "a list of tag names"),
        ("{name: length}", "args.max", "`max`, `min` or both"),
        ("{name: length, args: {min: 5, max: 4}}", "args.min", "more than `max`"),
        ("{name: length, args: {max: 0}}", "args.max", "an integer of at least 1"),
        ("{name: numeric_match, args: {tolerance: -1}}", "args.tolerance", "at least 0"),
        ("{name: 'mine:f', args: {completions: 1}}", "args.completions", "every reward gets"),
        ("{name: exact_match, weight: 0}", "weight", "weight 0"),
    ],
)
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_wrong_rewards_are_faults_with_their_line(
    tmp_path: Path, method: str, reward: str, key: str, said: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"method: {method}\nmodel: builtin://tiny-llama\ndataset: builtin://orders\n{method}:\n  reward_funcs:\n"
        f"    - {reward}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), environ={})
    fault = next(fault for fault in caught.value.faults if fault.key == f"{method}.reward_funcs[0].{key}")
    assert said in str(fault)
    assert fault.where.endswith("r.yaml:6")


def test_good_rewards_are_no_faults(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("""method: grpo
model: builtin://tiny-llama
dataset: builtin://orders
grpo:
  reward_funcs:
    - {name: json_schema, args: {schema: {type: object, required: [a]}, valid_json: 0.5}}
    - {name: my.rewards:brevity, weight: -0.5, args: {limit: 3, any: [thing]}}
    - {name: exact_match, weight: 0}
""")
    assert len(load_recipe(str(path), environ={}).recipe.grpo.reward_funcs) == 3  # type: ignore[union-attr] # method grpo
