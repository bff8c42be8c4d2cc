"""What an initializer is told, by environment variables: Kubeflow Trainer's contract and ours.

| variable | meaning |
|---|---|
| `STORAGE_URI` | source: `hf://org/name[@revision]`, `file:///path`, `builtin://name` (required) |
| `REVISION` | branch, tag or commit of a `hf://` source |
| `IGNORE_PATTERNS` | comma-separated globs of files not to fetch |
| `HF_TOKEN`, `ACCESS_TOKEN` | token for gated or private repositories; the first one set is used |
| `HF_ENDPOINT` | address of the Hub or of a mirror (default `https://huggingface.co`) |
| `BLUEPRINTS_RECIPE` | recipe (shipped name or YAML file) that the rows are prepared for; unset: only fetch |
| `BLUEPRINTS_OVERRIDES` | JSON list of `key=value` overrides of that recipe |
| `BLUEPRINTS_WORKSPACE` | directory that gets `model/` and `dataset/` (default `/workspace`) |
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blueprints.errors import UsageError
from blueprints.recipe.schema import ModelConfig, Recipe

Kind = Literal["dataset", "model"]
Role = Literal["dataset", "model", "teacher", "reward_model", "adapter"]
"""A directory of the workspace, and what is in it."""


@dataclass(frozen=True)
class Request:
    """One source to bring into the workspace.

    Attributes:
        kind: what it is; some sources treat models and data sets differently.
        uri: the source as the user wrote it.
        revision: branch, tag or commit asked for beside the URI, None for the source's default.
        ignore_patterns: globs of files not to fetch.
        token: secret for the source; never shown.
        endpoint: address of the Hub, None for the public one.
        trust_remote_code: fetch the Python files of a model too.
        role: the directory that gets it. Default: `kind`.
    """

    kind: Kind
    uri: str
    revision: str | None = None
    ignore_patterns: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    trust_remote_code: bool = False
    role: Role | None = None

    @property
    def directory(self) -> Role:
        """The directory of the workspace that gets it."""
        return self.role or self.kind


@dataclass(frozen=True)
class Settings:
    """Everything one run of an initializer depends on.

    Attributes:
        request: the source to fetch.
        workspace: directory that gets `model/` and `dataset/`.
        recipe: the resolved recipe to prepare rows for; None: only fetch.
    """

    request: Request
    workspace: Path
    recipe: Recipe | None


def read_settings(kind: Kind, environ: Mapping[str, str] | None = None, *, uri_from_recipe: bool = False) -> Settings:
    """The settings in `environ`.

    Args:
        kind: which initializer runs.
        environ: the environment. Default: this process's.
        uri_from_recipe: without `STORAGE_URI` take the recipe's own source.

    Raises:
        UsageError: `STORAGE_URI` is missing, or a variable has a value that cannot be read.
        RecipeError: the recipe or an override has faults.
    """
    env = os.environ if environ is None else environ
    recipe = _recipe(env)
    block = None if recipe is None else (recipe.model if kind == "model" else recipe.dataset)
    uri = env.get("STORAGE_URI", "").strip()
    if not uri and uri_from_recipe and block is not None:
        uri = block.uri
    if not uri:
        raise UsageError(
            "STORAGE_URI is not set: nothing says where the " + ("model" if kind == "model" else "data set") + " is",
            where="environment",
            todo="set it to hf://org/name, file:///path or builtin://name",
        )
    same = block is not None and block.uri == uri
    revision = env.get("REVISION", "").strip() or (block.revision if block is not None and same else None)
    return Settings(
        request=Request(
            kind=kind,
            uri=uri,
            revision=revision,
            ignore_patterns=_patterns(kind, env, recipe),
            token=env.get("HF_TOKEN", "").strip() or env.get("ACCESS_TOKEN", "").strip() or None,
            endpoint=env.get("HF_ENDPOINT", "").strip().rstrip("/") or None,
            trust_remote_code=recipe is not None and recipe.model.trust_remote_code,
        ),
        workspace=Path(env.get("BLUEPRINTS_WORKSPACE", "").strip() or "/workspace").absolute(),
        recipe=recipe,
    )


def _patterns(kind: Kind, env: Mapping[str, str], recipe: Recipe | None) -> tuple[str, ...]:
    """An empty IGNORE_PATTERNS means "ignore nothing"; an absent one means the recipe's, else the default."""
    if "IGNORE_PATTERNS" in env:
        return tuple(part.strip() for part in env["IGNORE_PATTERNS"].split(",") if part.strip())
    if recipe is not None:
        return tuple((recipe.model if kind == "model" else recipe.dataset).ignore_patterns)
    return tuple(ModelConfig(uri="builtin://default").ignore_patterns) if kind == "model" else ()


def _recipe(env: Mapping[str, str]) -> Recipe | None:
    name = env.get("BLUEPRINTS_RECIPE", "").strip()
    overrides = _overrides(env.get("BLUEPRINTS_OVERRIDES", ""))
    if not name:
        if overrides:
            raise UsageError(
                "BLUEPRINTS_OVERRIDES is set without BLUEPRINTS_RECIPE",
                where="environment",
                todo="set BLUEPRINTS_RECIPE to the recipe that the overrides change",
            )
        return None
    from blueprints.recipe import load_recipe

    # The client folded its environment (LORA_CONFIG) into the overrides already.
    return load_recipe(name, overrides=overrides, environ={}).recipe


def _overrides(text: str) -> list[str]:
    if not text.strip():
        return []
    todo = """write a JSON list of strings: '["lora.r=4", "training.max_length=512"]'"""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", where="environment BLUEPRINTS_OVERRIDES", todo=todo) from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError("not a list of strings", where="environment BLUEPRINTS_OVERRIDES", todo=todo)
    return value
