"""Combinations that cannot work, each with its reason."""

from __future__ import annotations

from blueprints.errors import Fault
from blueprints.recipe.document import Node
from blueprints.recipe.schema import Recipe


def rule_faults(recipe: Recipe, merged: Node) -> list[Fault]:
    """Every combination in `recipe` that cannot work."""
    return []
