"""The recipes that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parent.parent / "recipes"


@dataclass(frozen=True)
class ShippedRecipe:
    """One recipe of the package.

    Attributes:
        name: what `blueprints train` takes.
        method: its method.
        description: one line, from the file's first comment.
        path: the file.
    """

    name: str
    method: str
    description: str
    path: Path


def shipped_names() -> list[str]:
    """Names of the shipped recipes, `quickstart` first."""
    return sorted((path.stem for path in FOLDER.glob("*.yaml")), key=lambda name: (name != "quickstart", name))


def shipped_path(name: str) -> Path | None:
    """The file of the shipped recipe `name`, None if there is none."""
    path = FOLDER / f"{name}.yaml"
    return path if name in shipped_names() else None


def shipped_recipes() -> list[ShippedRecipe]:
    """The recipes that come with the package, `quickstart` first, then by name."""
    return [_read(FOLDER / f"{name}.yaml") for name in shipped_names()]


def _read(path: Path) -> ShippedRecipe:
    text = path.read_text(encoding="utf-8")
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    description = next((line for line in comments if line and not line.startswith("yaml-language-server")), "")
    return ShippedRecipe(path.stem, yaml.safe_load(text)["method"], description, path)
