"""The verbs that need no job: recipes, show, explain, validate, schema."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blueprints.cli.paint import Span, echo
from blueprints.errors import EnvironmentFault, ExitCode, ManifestError, RecipeError
from blueprints.manifest_files import is_manifest, require_valid_files
from blueprints.manifests import RUNTIME_KINDS
from blueprints.recipe import LoadedRecipe, Origin, load_recipe, shipped_recipes
from blueprints.recipe.explain import Explanation, explain_in
from blueprints.recipe.json_schema import json_schema
from blueprints.recipe.schema import Recipe
from blueprints.recipe.write import annotated, recipe_text, yaml_value
from blueprints.termination import VARIABLE as TERMINATION_LOG
from blueprints.termination import read_termination

NEEDED_FOR_DATA = ("pyarrow", "huggingface_hub", "tokenizers", "transformers", "jinja2", "numpy")
"""What the extra `initializers` brings, by import name."""


def load(args: argparse.Namespace) -> LoadedRecipe:
    """The recipe that a verb's arguments name, with all its layers.

    Raises:
        RecipeError: with every fault.
    """
    return load_recipe(args.recipe, overlays=args.files, overrides=args.overrides)


def recipes(args: argparse.Namespace) -> int:
    """`blueprints recipes`."""
    rows = [_row(shipped.name, shipped.method, shipped.description) for shipped in shipped_recipes()]
    if args.json:
        return _print_json(rows)
    table = [["NAME", "METHOD", "MODEL", "DATASET"], *([row[key] for key in ROW[:4]] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    for index, line in enumerate(table):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        echo(Span(text, "bold" if index == 0 else ""))
        if index:
            echo(Span(f"  {rows[index - 1]['description']}", "dim"))
    echo(Span("\nRun one with `blueprints train NAME`, read one with `blueprints show NAME`."))
    return ExitCode.DONE


ROW = ("name", "method", "model", "dataset", "description")


def _row(name: str, method: str, description: str) -> dict[str, str]:
    recipe = load_recipe(name, environ={}).recipe
    return dict(zip(ROW, (name, method, recipe.model.uri, recipe.dataset.uri, description), strict=True))


def show(args: argparse.Namespace) -> int:
    """`blueprints show`."""
    loaded = load(args)
    if args.json:
        origins = {key: {"layer": origin.layer, "where": origin.where} for key, origin in loaded.origins.items()}
        data = {"recipe": loaded.recipe.model_dump(mode="json"), "origins": origins, "hash": loaded.recipe.hash()}
        return _print_json(data)
    lines = annotated(loaded.recipe, loaded.origins)
    width = min(72, max(len(text) for text, _ in lines))
    for text, comment in lines:
        style = "dim" if comment.startswith(("# default", "# idle")) else "cyan"
        echo(Span(text.ljust(width) if comment else text), Span(f"  {comment}" if comment else "", style))
    echo(Span(f"# hash {loaded.recipe.hash()}", "bold"))
    return ExitCode.DONE


def explain(args: argparse.Namespace) -> int:
    """`blueprints explain`."""
    found = explain_in(args.key, args.recipe, args.files, args.overrides, os.environ)
    if args.json:
        return _print_json(found.as_dict())
    echo(Span(found.key, "bold"))
    echo(Span(textwrap.fill(found.meaning, 100, initial_indent="  ", subsequent_indent="  ")))
    facts = [("type", found.type), ("default", found.default)]
    if found.origin is not None and not found.keys:
        facts += [("value", yaml_value(found.value)), ("set by", _set_by(found))]
    for name, text in facts:
        echo(Span(f"  {name + ':':<9}", "dim"), Span(_hanging(text, 11)))
    if found.keys:
        echo(Span("  keys:", "dim"))
    for inner in found.keys:
        _echo_key(inner)
    return ExitCode.DONE


def _hanging(text: str, indent: int) -> str:
    return textwrap.fill(text, 100 - indent, subsequent_indent=" " * indent)


def _set_by(found: Explanation) -> str:
    origin = found.origin or Origin("default")
    if origin.layer == "derived" and not origin.where:
        return f"derived: {found.default}"
    return str(origin)


def _echo_key(inner: Explanation) -> None:
    name = inner.key.rpartition(".")[2]
    echo(Span(f"    {name}", "bold"), Span(f"  {inner.type}; default: {inner.default}", "dim"))
    if inner.origin is not None and not isinstance(inner.value, dict):
        echo(Span(f"      = {yaml_value(inner.value)}", "cyan"), Span(f"  ({_set_by(inner)})", "dim"))
    echo(Span(textwrap.fill(inner.meaning, 100, initial_indent="      ", subsequent_indent="      ")))


def schema(_args: argparse.Namespace) -> int:
    """`blueprints schema`."""
    return _print_json(json_schema())


def validate(args: argparse.Namespace) -> int:
    """`blueprints validate`: a recipe, or manifests."""
    named = [args.recipe] if args.recipe is not None else []
    if args.recipe is None or is_manifest(Path(args.recipe)):
        return _validate_manifests(args, [*named, *args.files])
    try:
        loaded = load(args)
    except RecipeError as error:
        if not args.json:
            raise
        _print_json({"ok": False, **error.as_dict()})
        return error.exit_code
    code, data = _check_data(loaded.recipe, quiet=args.json) if args.data else (0, None)
    if args.json:
        result = {"ok": code == 0, "recipe": args.recipe, "method": loaded.recipe.method, "hash": loaded.recipe.hash()}
        _print_json(result | (data or {}) | ({"exit_code": code} if code else {}))
    elif code == 0:
        checked = "recipe and data are valid" if args.data else "the recipe is valid"
        echo(Span("OK", "bold green"), Span(f"  {args.recipe}: {checked} (method {loaded.recipe.method})"))
        echo(Span(f"    hash {loaded.recipe.hash()}", "dim"))
    return code


def _validate_manifests(args: argparse.Namespace, files: list[str]) -> int:
    try:
        documents = require_valid_files(files)
    except ManifestError as error:
        if not args.json:
            raise
        _print_json({"ok": False, **error.as_dict()})
        return error.exit_code
    checked = [item for item in documents if item.kind in ("TrainJob", *RUNTIME_KINDS)]
    if args.json:
        return _print_json({"ok": True, "objects": [{"kind": item.kind, "name": item.name} for item in checked]})
    for item in checked:
        echo(Span("OK", "bold green"), Span(f"  {item.file}: {item.kind} {item.name} is valid"))
    return ExitCode.DONE


def _check_data(recipe: Recipe, *, quiet: bool) -> tuple[int, dict[str, Any] | None]:
    """Run the data set initializer's checks in a process of its own, as a job would run them.

    Returns:
        its exit code, and its error as JSON data if it left one.

    Raises:
        EnvironmentFault: the extra with the data libraries is not installed.
    """
    missing = [name for name in ("initializers", *NEEDED_FOR_DATA) if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"checking data needs libraries that are not installed: {', '.join(missing)}",
            where="blueprints validate --data",
            todo="pip install 'llm-blueprints[initializers]'",
        )
    with tempfile.TemporaryDirectory(prefix="blueprints-validate-") as scratch:
        file, cause = Path(scratch, "recipe.yaml"), Path(scratch, "cause.json")
        file.write_text(recipe_text(recipe), encoding="utf-8")
        # The file holds the resolved recipe, with every layer in it: nothing is to be laid over it again.
        kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        own = {"BLUEPRINTS_RECIPE": str(file), "BLUEPRINTS_WORKSPACE": scratch, TERMINATION_LOG: str(cause)}
        command = [sys.executable, "-m", "initializers", "validate"]
        sys.stdout.flush()
        code = subprocess.run(command, env=kept | own, stdout=sys.stderr if quiet else None, check=False).returncode
        return (code if code >= 0 else int(ExitCode.BUG)), read_termination(cause)


NOT_INHERITED = (
    "LORA_CONFIG", "STORAGE_URI", "REVISION", "IGNORE_PATTERNS", "BLUEPRINTS_OVERRIDES", "BLUEPRINTS_PROGRESS",
)  # fmt: skip
"""Variables that would tell an initializer something else than the recipe does."""


def _print_json(data: dict[str, Any] | Sequence[dict[str, Any]]) -> int:
    print(json.dumps(data, indent=2, ensure_ascii=False))
    return ExitCode.DONE
