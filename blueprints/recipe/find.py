"""From the name a user gives to a recipe file."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from blueprints.errors import Fault
from blueprints.recipe.shipped import shipped_names, shipped_path


@dataclass(frozen=True)
class FoundRecipe:
    """Where a recipe lies, or why not.

    Attributes:
        path: the file, None if there is none.
        shown: the file's name in messages.
        shipped: the name, if it is a shipped recipe.
        faults: why there is no file.
    """

    path: Path | None
    shown: str
    shipped: str | None = None
    faults: tuple[Fault, ...] = ()


def find_recipe(source: str) -> FoundRecipe:
    """The recipe called `source`: a shipped name, else a path."""
    if not source.strip():
        return FoundRecipe(None, source, faults=(Fault("RECIPE", "", "the name is empty", _expected()),))
    shipped = shipped_path(source)
    if shipped is not None:
        return FoundRecipe(shipped, shipped.name, source)
    shown = shown_name(source)
    try:
        if Path(source).exists():
            return FoundRecipe(Path(source), shown)
    except (OSError, ValueError):  # a name too long for the system, or with a NUL byte
        return FoundRecipe(None, shown, faults=(Fault(shown, "", "no file can have this name", _expected()),))
    if Path(source).is_symlink():
        problem = f"a link to {shown_name(str(Path(source).readlink()))}, which does not exist"
        return FoundRecipe(None, shown, faults=(Fault(shown, "", problem, _expected()),))
    return FoundRecipe(None, shown, faults=(Fault(shown, "", "no such recipe", _expected(), _near(source)),))


def shown_name(name: str) -> str:
    """A file's name for messages: short, and without characters a terminal acts on."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= 200 else shown[:196] + " ..."


def _expected() -> str:
    return f"a shipped recipe ({', '.join(shipped_names())}) or the path of a YAML file"


def _near(source: str) -> str:
    path = Path(source)
    if path.suffix in (".yaml", ".yml") and path.stem in shipped_names() and path.name == source:
        return f"The shipped recipe is called `{path.stem}`, without the ending."
    names = difflib.get_close_matches(path.stem.lower(), shipped_names(), 2, 0.6)
    folder = path.parent
    try:
        files = [entry.name for entry in os.scandir(folder) if entry.name.endswith((".yaml", ".yml"))]
    except OSError:
        missing = "" if folder == Path() else f"The directory {folder} does not exist."
        return " ".join(filter(None, [missing, _did_you_mean(names)]))
    same_stem = [name for name in files if Path(name).stem == path.name or Path(name).stem == path.stem]
    near = same_stem or difflib.get_close_matches(path.name, files, 2, 0.6)
    return _did_you_mean([*(str(folder / name) for name in sorted(near)[:3]), *names])


def _did_you_mean(names: list[str]) -> str:
    return "Did you mean " + " or ".join(f"`{name}`" for name in names) + "?" if names else ""
