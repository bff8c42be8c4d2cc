"""`python tests/methods_table.py`: docs/methods.md, from the `covers` marks of the tests and the recipe's own rules.

A combination counts as tested because a test says so by its mark, as refused because the recipe's rules refuse it here
and now, and as not applicable because `NOT_APPLICABLE` says why. Nothing else is written by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from blueprints import RecipeError, load_recipe

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("sft", "dpo", "ppo", "grpo", "distill", "qat")
TUNINGS = {
    "full": "lora=null",
    "lora": "lora={}",
    "qlora": "lora={quantize_base: true}",
    "dora": "lora={use_dora: true}",
}
TUNING_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA", "dora": "DoRA"}
WORLDS = {
    "1 process": (),
    "ddp": ("resources.num_proc_per_node=2", "resources.strategy=ddp"),
    "fsdp": ("resources.num_proc_per_node=2", "resources.strategy=fsdp"),
    "zero2": ("resources.num_proc_per_node=2", "resources.strategy=zero2"),
    "zero3": ("resources.num_proc_per_node=2", "resources.strategy=zero3"),
    "mpi": ("resources.num_proc_per_node=2",),
}
FEATURES = {"train": "T", "resume": "R", "packing": "P", "eval": "E", "export": "X"}
NOT_APPLICABLE = {
    (method, "packing"): why
    for method, why in (
        ("dpo", "pairs are compared answer by answer"),
        ("ppo", "completions are sampled, not read"),
        ("grpo", "completions are sampled, not read"),
        ("distill", "prompts and answers are needed apart for sampling"),
    )
}
Cell = tuple[str, str, str, str]


class Marks:
    """A pytest plugin that notes what every collected test says it covers."""

    def __init__(self) -> None:
        self.found: dict[Cell, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("covers"):
                for cell in cells(**mark.kwargs):
                    self.found.setdefault(cell, set()).add(item.nodeid.partition("[")[0])


def cells(
    method: str | Iterable[str], tuning: str | Iterable[str], world: str | Iterable[str], feature: str | Iterable[str]
) -> Iterator[Cell]:
    """The cells of one mark; every argument is a name or several.

    Raises:
        ValueError: a name is none of the table's.
    """
    axes = [[axis] if isinstance(axis, str) else list(axis) for axis in (method, tuning, world, feature)]
    for axis, known in zip(axes, (METHODS, TUNINGS, WORLDS, FEATURES), strict=True):
        for name in axis:
            if name not in known:
                raise ValueError(f"covers: {name!r} is none of {', '.join(known)}")
    yield from itertools.product(*axes)


def collect() -> dict[Cell, set[str]]:
    """Every covered cell with the tests that cover it."""
    marks = Marks()
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_*.py") if ".covers(" in path.read_text())
    options = ["--collect-only", "-qq", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider"]
    # Collecting prints the list of tests: the table alone belongs on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main([*options, *files], [marks])
    if code:
        raise SystemExit(f"the tests cannot be collected: pytest ended with {code}")
    return marks.found


def refusal(method: str, tuning: str, world: str, feature: str = "train") -> str | None:
    """Why the recipe refuses a combination; None if it does not."""
    overrides = [TUNINGS[tuning], *WORLDS[world], *REQUIRED.get(method, ())]
    if feature == "packing" and method in ("sft", "qat"):
        overrides.append(f"{method}.packing=true")
    base = {"method": method, "model": "hf://org/model", "dataset": "hf://org/rows"}
    try:
        load_recipe(None, base=base, overrides=overrides, environ={})
    except RecipeError as error:
        return re.sub(r"\s+", " ", error.faults[0].problem)
    return None


REQUIRED = {
    "ppo": ("ppo.reward_funcs=[{name: exact_match}]",),
    "grpo": ("grpo.reward_funcs=[{name: exact_match}]",),
    "distill": ("distill.teacher=hf://org/teacher",),
}
"""What a recipe of the method must say beyond model and rows."""


def table(found: dict[Cell, set[str]], reasons: list[str]) -> Iterator[str]:
    """The lines of the table; reasons of refusals are collected in `reasons`."""
    yield f"| method | tuning | {' | '.join(WORLDS)} |"
    yield f"|---|---|{'---|' * len(WORLDS)}"
    for method, tuning in itertools.product(METHODS, TUNINGS):
        shown = [entry(found, method, tuning, world, reasons) for world in WORLDS]
        yield f"| {method} | {TUNING_NAMES[tuning]} | {' | '.join(shown)} |"


def entry(found: dict[Cell, set[str]], method: str, tuning: str, world: str, reasons: list[str]) -> str:
    """One entry: letters of what is tested, or a number of the reason for the refusal."""
    why = refusal(method, tuning, world)
    if why is not None:
        if any((method, tuning, world, feature) in found for feature in FEATURES):
            raise SystemExit(f"{method}, {tuning}, {world} is refused by the recipe and covered by a test")
        if why not in reasons:
            reasons.append(why)
        return f"refused <sup>{reasons.index(why) + 1}</sup>"
    letters = [letter for name, letter in FEATURES.items() if (method, tuning, world, name) in found]
    return " ".join(letters) or "–"


def page(found: dict[Cell, set[str]]) -> str:
    """The whole page."""
    reasons: list[str] = []
    rows = list(table(found, reasons))
    tests = sorted({test for names in found.values() for test in names})
    return "\n".join(
        [
            "# What is tested: methods, tuning, processes",
            "",
            "<!-- Written by `make methods` from the marks of the tests. Do not edit. -->",
            "",
            "Every letter stands for at least one test that runs the real trainer in that combination: **T** trains to the",
            "end with its proofs, **R** is killed and goes on to the same result, **P** packs, **E** measures before and",
            "after, **X** saves what it trained (adapter or model, merged where that applies) and reloads it. *Refused*: the",
            "recipe says no before anything runs, for the reason below. –: not refused, and no test of its own.",
            "",
            *rows,
            "",
            *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
            "",
            "Not applicable:",
            "",
            *(f"- {feature} with {method}: {why}" for (method, feature), why in NOT_APPLICABLE.items()),
            "",
            f"Several processes are real process groups on CPU (gloo). The {len(tests)} tests behind the letters:",
            "",
            *(f"- `{test}`" for test in tests),
            "",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page(collect()))
