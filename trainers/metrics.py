"""Scores of answers against references, by name, and functions of the user's own.

Each named score is one number between 0 and 1 per answer; a metric is their mean. Definitions with their sources are in
docs/evaluation.md.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blueprints.errors import UsageError
from trainers.functions import load_function

Score = Callable[[str, str], float]

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(answer: str, reference: str) -> float:
    """1 if they are equal after trimming white space."""
    return float(answer.strip() == reference.strip())


def contains(answer: str, reference: str) -> float:
    """1 if the trimmed reference, which must not be empty, stands somewhere in the answer."""
    wanted = reference.strip()
    return float(bool(wanted) and wanted in answer)


def numeric_match(answer: str, reference: str) -> float:
    """1 if the last numbers in both are equal to 1e-6 relative (GSM8K's way, arXiv:2110.14168); `1,000` is 1000."""
    given, wanted = _last_number(answer), _last_number(reference)
    return float(given is not None and wanted is not None and math.isclose(given, wanted, rel_tol=1e-6, abs_tol=1e-9))


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def json_match(answer: str, reference: str) -> float:
    """1 if both are JSON and the same value: key order and white space do not count, `1` and `1.0` are equal."""
    try:
        given, wanted = json.loads(answer), json.loads(reference)
    except (ValueError, RecursionError):
        return 0.0
    return float(_typed(given) == _typed(wanted))


def _typed(value: Any) -> Any:
    """Python takes true for 1; JSON does not."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return ("boolean", value) if isinstance(value, bool) else value


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words both have, as SQuAD counts them (arXiv:1606.05250): lower case, no punctuation, no articles."""
    given, wanted = _squad_words(answer), _squad_words(reference)
    if not given or not wanted:
        return float(given == wanted)
    return _f1(sum((Counter(given) & Counter(wanted)).values()), len(given), len(wanted))


def _squad_words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return ARTICLES.sub(" ", plain).split()


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (ROUGE-L, Lin 2004; beta 1): lower case, words of letters and
    digits, no stemming."""
    given, wanted = (re.findall(r"[^\W_]+", text.lower()) for text in (answer, reference))
    if not given or not wanted:
        return float(given == wanted)
    row = [0] * (len(wanted) + 1)
    for word in given:
        diagonal = 0
        for index, other in enumerate(wanted, 1):
            diagonal, row[index] = row[index], diagonal + 1 if word == other else max(row[index], row[index - 1])
    return _f1(row[-1], len(given), len(wanted))


def _f1(common: int, given: int, wanted: int) -> float:
    return 2 * common / (given + wanted)


METRICS: Mapping[str, Score] = {
    "exact_match": exact_match,
    "contains": contains,
    "numeric_match": numeric_match,
    "json_match": json_match,
    "token_f1": token_f1,
    "rouge_l": rouge_l,
}


def measure(name: str, prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The metric `name` of `answers`.

    A function of the user's own, `package.module:function`, is called once, with `prompts`, `answers` and `references` by
    keyword: lists of text of one length. It returns one number per answer, of which the mean is taken, or one for all.

    Returns:
        the value by the metric's name (a function's own name).

    Raises:
        UsageError: the function cannot be found, or returns something else.
    """
    if name in METRICS:
        found = [METRICS[name](answer, reference) for answer, reference in zip(answers, references, strict=True)]
        return {name: sum(found) / len(found)}
    own = load_function(name, where="eval.metric")
    value = own(prompts=list(prompts), answers=list(answers), references=list(references))
    numbers = value if isinstance(value, list | tuple) else [value]
    if len(numbers) not in (1, len(answers)) or not all(_is_number(number) for number in numbers):
        raise UsageError(
            f"it returned {str(value)[:100]!r}",
            where=f"eval.metric={name}",
            todo=f"return one finite number, or a list of {len(answers)}: one per answer",
        )
    return {name.partition(":")[2]: sum(map(float, numbers)) / len(numbers)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
