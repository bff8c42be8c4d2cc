"""What a recipe asks of a cluster and cannot have: variables twice, volumes where others lie, secrets in plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from blueprints.recipe.schema import Recipe
from blueprints.secret_text import has_secret, is_secret

RESERVED_VOLUMES = ("initializer", "tmp", "shm")
"""Volumes of the runtimes."""
RESERVED_PATHS = ("/workspace", "/tmp", "/dev/shm")
VOLUME_SOURCES = ("persistent_volume_claim", "secret", "config_map")
Found = tuple[str, str, str, str]
"""Key, problem, what was expected, what to do."""


def cluster_faults(recipe: Recipe) -> Iterator[Found]:
    """Everything wrong with what the recipe asks of a cluster."""
    yield from _variables(recipe)
    yield from _volumes(recipe)
    yield from _tolerations(recipe)
    yield from _secrets(recipe.model_dump(mode="json", exclude={"runtime": {"env"}}), "")


def _variables(recipe: Recipe) -> Iterator[Found]:
    runtime = recipe.runtime
    for name, value in runtime.env.items():
        if is_secret(name, value):
            hint = (
                f"Put it into a Secret and refer to it: runtime.env_from.{name}.secret_key_ref={{name: ..., key: ...}}."
            )
            yield f"runtime.env.{name}", "is a secret in plain text", "a reference to a Secret", hint
    for name, source in runtime.env_from.items():
        if (source.secret_key_ref is None) == (source.config_map_key_ref is None):
            one = "exactly one of secret_key_ref and config_map_key_ref"
            yield f"runtime.env_from.{name}", "does not say where the value comes from", one, ""
        if name in runtime.env:
            yield f"runtime.env_from.{name}", "is in runtime.env too", "every variable once", "Leave out one of them."


def _volumes(recipe: Recipe) -> Iterator[Found]:
    names: set[str] = set()
    paths: set[str] = set()
    for place, volume in enumerate(recipe.runtime.volumes):
        key = f"runtime.volumes[{place}]"
        given = [name for name in VOLUME_SOURCES if dict(volume)[name] is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "does not say what is mounted"
            yield key, found, f"exactly one of {', '.join(VOLUME_SOURCES)}", ""
        if volume.name in names:
            yield (
                f"{key}.name",
                f"{volume.name!r} is given twice",
                "every name once",
                "A volume is mounted at one path.",
            )
        if volume.name in RESERVED_VOLUMES:
            yield f"{key}.name", f"{volume.name!r} is a volume of the runtimes", "another name", ""
        path = volume.mount_path.rstrip("/")
        taken = [
            other
            for other in RESERVED_PATHS
            if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")
        ]
        if taken:
            yield (
                f"{key}.mount_path",
                f"{path or '/'} covers or lies below {taken[0]}",
                "a path of its own, such as /data",
                "",
            )
        if path in paths:
            yield f"{key}.mount_path", f"{path} is given twice", "every path once", ""
        names.add(volume.name)
        paths.add(path)


def _tolerations(recipe: Recipe) -> Iterator[Found]:
    for place, toleration in enumerate(recipe.runtime.tolerations):
        key = f"runtime.tolerations[{place}]"
        if toleration.operator == "Exists" and toleration.value is not None:
            yield f"{key}.value", "means nothing with operator Exists", "", "Leave it out, or use operator Equal."
        if toleration.operator == "Equal" and toleration.key is None:
            yield f"{key}.key", "is missing", "the taint's key", "Only operator Exists does without: all taints."
        if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
            yield f"{key}.toleration_seconds", "means nothing without effect NoExecute", "", "Leave it out."


def _secrets(value: Any, key: str) -> Iterator[Found]:
    """Texts anywhere in the recipe that look like a token: they would be stored with the job and its results."""
    if isinstance(value, str) and has_secret(value):
        hint = "Set it in the environment (HF_TOKEN, ...) or name a Secret with runtime.secret_ref."
        yield key, "holds what looks like a secret", "no tokens, keys or passwords in a recipe", hint
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _secrets(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _secrets(item, f"{key}[{place}]")
