"""Measures that are taken before training and after it: their names in `run.json`, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LABELS: dict[str, tuple[str, str]] = {
    "eval_loss": ("held-out loss", ".4f"),
    "eval_loss_unquantized": ("without rounding", ".4f"),
    "exact_match": ("exact match", ".1%"),
    "contains": ("contains the reference", ".1%"),
    "numeric_match": ("numeric match", ".1%"),
    "json_match": ("JSON match", ".1%"),
    "token_f1": ("token F1", ".3f"),
    "rouge_l": ("ROUGE-L", ".3f"),
    "preference_accuracy": ("preference accuracy", ".1%"),
    "reward_margin": ("reward margin", ".3f"),
    "reward": ("mean reward", ".3f"),
    "kl": ("KL to the reference", ".4f"),
    "teacher_kl": ("KL from the teacher", ".4f"),
    "teacher_agreement": ("same as the teacher", ".1%"),
    "nll": ("nats per token", ".4f"),
}
"""What a measure is called and its format. One that is not here is shown by its own name with four digits."""


RESULTS: dict[str, tuple[str, str]] = {
    "teacher_gap_closed": ("teacher gap closed", ".1%"),
}
"""Numbers of a whole run, which are not taken before and after: what each is called and its format."""


@dataclass(frozen=True)
class Measure:
    """One measure, before training and after it.

    Attributes:
        name: as `run.json` has it, without `_before` and `_after`.
        label: what it is called.
        before, after: the values as they are shown.
    """

    name: str
    label: str
    before: str
    after: str


def label(name: str) -> tuple[str, str]:
    """What the measure `name` is called, and the format of its values."""
    return LABELS.get(name, (name.replace("_", " "), ".4g"))


def measures(metrics: Mapping[str, Any]) -> Iterator[Measure]:
    """The measures of a run that were taken both before and after, those that need generation first."""
    names = [key.removesuffix("_after") for key in metrics if key.endswith("_after")]
    for name in sorted(names, key=lambda name: name == "eval_loss"):
        before, after = metrics.get(f"{name}_before"), metrics[f"{name}_after"]
        if isinstance(before, int | float) and isinstance(after, int | float):
            text, style = label(name)
            yield Measure(name, text, f"{before:{style}}", f"{after:{style}}")


def results(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and value of the run's numbers that are not taken before and after."""
    for name, (text, style) in RESULTS.items():
        if isinstance(metrics.get(name), int | float):
            yield text, f"{metrics[name]:{style}}"
