"""Kubernetes quantities: `2`, `"500m"`, `"1.5Gi"`, `"1e3"`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction

_QUANTITY = re.compile(r"^(\d+|\d+\.\d*|\.\d+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d+))?$")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def exact(value: object) -> Fraction:
    """A quantity as an exact number.

    Raises:
        ValueError: it is not one.
    """
    match = _QUANTITY.match(str(value))
    if not match or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a Kubernetes quantity")
    number, suffix, exponent = match.groups()
    amount = Fraction(number)
    if suffix in _BINARY:
        return amount * Fraction(2) ** _BINARY[suffix]
    power: int = int(exponent) if exponent else _DECIMAL[suffix or ""]
    return amount * Fraction(10) ** power


def parse_quantity(value: object) -> float:
    """A quantity as a number.

    Raises:
        ValueError: it is not one.
    """
    return float(exact(value))


def whole(value: object) -> int:
    """A quantity rounded up to a whole number, as Kubernetes reads counts.

    Raises:
        ValueError: it is not one.
    """
    return math.ceil(exact(value))


def total(values: Iterable[object]) -> str:
    """The sum of quantities in Kubernetes' canonical form: the largest suffix that leaves a whole number, in powers of
    two if the first one has such a suffix.

    Raises:
        ValueError: one is no quantity.
    """
    amounts = list(values)
    amount = sum((exact(value) for value in amounts), Fraction(0))
    if not amount:
        return "0"
    if amounts and str(amounts[0]).endswith("i"):
        for suffix, power in reversed(_BINARY.items()):
            if (amount / 2**power).denominator == 1:
                return f"{int(amount / 2**power)}{suffix}"
    for suffix, power in reversed(_DECIMAL.items()):
        scaled = amount / Fraction(10) ** power
        if scaled.denominator == 1:
            return f"{int(scaled)}{suffix}"
    return f"{math.ceil(amount * 10**9)}n"
