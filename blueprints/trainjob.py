"""The TrainJob of a recipe, and how manifests are written as YAML."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from blueprints.errors import UsageError
from blueprints.manifests import API_GROUP, API_VERSION, name_limit
from blueprints.recipe import load_recipe, overrides_between
from blueprints.recipe.shipped import shipped_recipes
from blueprints.runtimes import (
    INITIALIZERS,
    Manifest,
    ancestor_of,
    get_runtime,
    pod_spec,
    recipe_of,
    replicated_jobs,
    trainer_container,
)

if TYPE_CHECKING:
    from blueprints.recipe import LoadedRecipe
    from blueprints.recipe.schema import EnvSource, Recipe, Toleration, Volume

API_DOMAIN = "blueprints.llm-blueprints.dev"
"""Domain of this product's labels, annotations and patches."""
RECIPE_HASH = f"{API_DOMAIN}/recipe-hash"
"""Annotation: sha256 of the resolved recipe. Equal hashes mean equal runs."""
PATCH_MANAGER = f"{API_DOMAIN}/recipe"
"""Under this name a recipe's volumes and placement are in `runtimePatches`: Kueue's and other clients' stay apart."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "llm-blueprints"}
_SUFFIX_DIGITS = 6
TEACHER = "teacher"
"""replicatedJob and container of the step in which a distillation's teacher scores the rows."""


def runtime_for(recipe: Recipe) -> Manifest:
    """The shipped runtime a resolved recipe runs on.

    Raises:
        UsageError: there is none of that name.
    """
    return get_runtime(runtime_name(recipe))


def runtime_name(recipe: Recipe) -> str:
    """Name of the runtime a recipe runs on: the one it asks for, else its method's."""
    return recipe.runtime.name or str(recipe.derived()["runtime.name"])


def train_job(loaded: LoadedRecipe, runtime: Manifest, *, name: str | None = None) -> Manifest:
    """The TrainJob that runs a recipe on a runtime.

    Its arguments carry only what differs from the recipe they name: the shipped one the user started from, else the
    runtime's own. Equal input gives equal output.

    Args:
        loaded: the recipe, resolved.
        runtime: a ClusterTrainingRuntime.
        name: of the job. Default: the recipe's name and the first digits of its hash.

    Raises:
        UsageError: the runtime has no command that would read the recipe, or starts more nodes than it asks for.
    """
    recipe = loaded.recipe
    _check_fit(recipe, runtime)
    base = loaded.shipped or recipe_of(runtime) or _nearest_recipe(recipe.method)
    overrides = overrides_between(_shipped_recipe(base), recipe)
    metadata = {
        "name": default_name(loaded, runtime) if name is None else name,
        "labels": {**MANAGED_BY, **dict(sorted(recipe.runtime.labels.items()))},
        "annotations": {RECIPE_HASH: recipe.hash(), **dict(sorted(recipe.runtime.annotations.items()))},
    }
    spec: Manifest = {
        "runtimeRef": {"apiGroup": API_GROUP, "kind": runtime["kind"], "name": runtime["metadata"]["name"]},
        "initializer": _initializer(recipe, base, overrides, runtime),
        "trainer": _trainer(recipe, base, overrides),
    }
    if not spec["initializer"]:
        del spec["initializer"]
    if patches := _patches(recipe, runtime, _teacher_env(recipe, runtime, base, overrides)):
        spec["runtimePatches"] = [patches]
    if recipe.runtime.suspend:
        spec["suspend"] = True
    if recipe.runtime.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = recipe.runtime.active_deadline_seconds
    if recipe.runtime.managed_by is not None:
        spec["managedBy"] = recipe.runtime.managed_by
    return {"apiVersion": API_VERSION, "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _check_fit(recipe: Recipe, runtime: Manifest) -> None:
    where = f"{runtime['kind']} {runtime['metadata']['name']}"
    if not (trainer_container(runtime) or {}).get("command"):
        todo = f"use llm-{'custom' if recipe.is_custom else recipe.method}, or give its container 'node' a command"
        raise UsageError("the runtime brings no trainer that reads recipes", where=where, todo=todo)
    mpi = (runtime["spec"].get("mlPolicy") or {}).get("mpi") or {}
    if mpi.get("runLauncherAsNode") and recipe.resources.num_nodes < 2:
        problem = "the runtime starts two nodes at least, its launcher is one of them; the recipe asks for one"
        raise UsageError(problem, where=where, todo="set resources.num_nodes=2, or use another runtime")


@functools.cache
def _nearest_recipe(method: str) -> str:
    """A shipped recipe of the method, for a runtime that names none; where there is none, one to start from."""
    own = [shipped.name for shipped in shipped_recipes() if shipped.method == method and shipped.name != "quickstart"]
    return min(own, key=lambda name: (len(name), name), default="sft")


@functools.cache
def _shipped_recipe(name: str) -> Recipe:
    """A shipped recipe as it is: it does not change while this process lives."""
    return load_recipe(name, environ={}).recipe


def default_name(loaded: LoadedRecipe, runtime: Manifest, *, unique: bool = False) -> str:
    """A valid job name made of the recipe's name and six hexadecimal digits.

    Args:
        loaded: the recipe.
        runtime: it decides how long a name may be.
        unique: random digits, for a new job; else those of the recipe's hash.
    """
    digits = secrets.token_hex(_SUFFIX_DIGITS // 2) if unique else loaded.recipe.hash()[:_SUFFIX_DIGITS]
    limit = name_limit(runtime, loaded.recipe.resources.num_nodes) - _SUFFIX_DIGITS - 1
    source = loaded.recipe.method if loaded.source == "python" else loaded.source
    stem = re.split(r"[/\\]", source)[-1].lower().removesuffix(".yaml").removesuffix(".yml")
    base = re.sub(r"[^a-z0-9]+", "-", stem).lstrip("-0123456789")[:limit].strip("-")
    return f"{base or loaded.recipe.method}-{digits}"


def _initializer(recipe: Recipe, base: str, overrides: list[str], runtime: Manifest) -> Manifest:
    steps = {ancestor_of(job) for job in replicated_jobs(runtime)}
    # Both get the whole recipe: rows are prepared for the method with the model's tokenizer.
    common = {
        "BLUEPRINTS_RECIPE": base,
        "BLUEPRINTS_OVERRIDES": json.dumps(overrides, ensure_ascii=False),
    }
    result: Manifest = {}
    for role, source in (("dataset", recipe.dataset), ("model", recipe.model)):
        if f"{role}-initializer" not in steps:
            continue  # a runtime for what is there already
        env = dict(common)
        if source.revision is not None:
            env["REVISION"] = source.revision
        if source.ignore_patterns:
            env["IGNORE_PATTERNS"] = ",".join(source.ignore_patterns)
        result[role] = {"storageUri": literal_text(source.uri), "env": _env(env)}
        if recipe.runtime.secret_ref is not None:
            result[role]["secretRef"] = {"name": recipe.runtime.secret_ref}
    return result


def _trainer(recipe: Recipe, base: str, overrides: list[str]) -> Manifest:
    resources = recipe.resources
    trainer: Manifest = {}
    if recipe.runtime.image is not None:
        trainer["image"] = recipe.runtime.image
    trainer["args"] = ["--recipe", base, *map(literal_text, overrides)]
    trainer["numNodes"] = resources.num_nodes
    trainer["numProcPerNode"] = resources.num_proc_per_node or max(1, resources.gpu)
    limits: Manifest = {}
    if resources.cpu is not None:
        limits["cpu"] = resources.cpu
    if resources.memory is not None:
        limits["memory"] = resources.memory
    if resources.gpu:
        limits[resources.gpu_resource] = resources.gpu
    if limits:
        trainer["resourcesPerNode"] = {"limits": limits}
    if env := [*_env(recipe.runtime.env), *_env_from(recipe.runtime.env_from)]:
        trainer["env"] = sorted(env, key=lambda entry: str(entry["name"]))
    return trainer


def _teacher_env(recipe: Recipe, runtime: Manifest, base: str, overrides: list[str]) -> list[Manifest]:
    """The variables that hand the recipe to the step in which the teacher scores the rows; none without such a step.

    Raises:
        UsageError: the recipe needs the step, and the runtime makes everything else but has not got it.
    """
    steps = [job.get("name") for job in replicated_jobs(runtime)]
    if TEACHER not in steps:
        if recipe.distill and recipe.distill.teacher_top_k is not None and INITIALIZERS[-1] in steps:
            raise UsageError(
                f"the runtime {runtime['metadata']['name']} has no step {TEACHER!r}, in which the teacher scores the rows "
                "for distill.teacher_top_k",
                where="runtime.name",
                todo="use llm-distill-offline or llm-distill-offline-gpu, or leave distill.teacher_top_k out",
            )
        return []
    variables = dict(recipe.runtime.env) | {
        "BLUEPRINTS_RECIPE": base,
        "BLUEPRINTS_OVERRIDES": json.dumps(overrides, ensure_ascii=False),
    }
    return [*_env(variables), *_env_from(recipe.runtime.env_from)]


def _env_from(sources: Mapping[str, EnvSource]) -> list[Manifest]:
    entries = []
    for name, source in sources.items():
        kind = "secretKeyRef" if source.secret_key_ref is not None else "configMapKeyRef"
        reference = source.secret_key_ref or source.config_map_key_ref
        assert reference is not None  # a rule of recipes
        value = {"name": reference.name, "key": reference.key, **({"optional": True} if reference.optional else {})}
        entries.append({"name": name, "valueFrom": {kind: value}})
    return entries


def _patches(recipe: Recipe, runtime: Manifest, teacher_env: list[Manifest]) -> Manifest | None:
    """What the recipe adds to the runtime's Pods: volumes and identity to every step, placement to those that compute, and
    its variables to the teacher's, which the TrainJob has no field for."""
    jobs = []
    for job in replicated_jobs(runtime):
        pod = _pod_patch(recipe, job)
        if job.get("name") == TEACHER and teacher_env:
            (container,) = pod.get("containers") or [{"name": TEACHER}]
            pod["containers"] = [{**container, "env": teacher_env}]
        if pod:
            jobs.append({"name": job["name"], "template": {"spec": {"template": {"spec": pod}}}})
    if not jobs:
        return None
    return {
        "manager": PATCH_MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }


def _pod_patch(recipe: Recipe, job: Manifest) -> Manifest:
    asked = recipe.runtime
    pod: Manifest = {}
    if asked.service_account_name is not None:
        pod["serviceAccountName"] = asked.service_account_name
    if asked.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in asked.image_pull_secrets]
    if ancestor_of(job) not in INITIALIZERS:
        if asked.node_selector:
            pod["nodeSelector"] = dict(sorted(asked.node_selector.items()))
        if asked.tolerations:
            pod["tolerations"] = [_toleration(toleration) for toleration in asked.tolerations]
    if asked.volumes:
        pod["volumes"] = [_volume(volume) for volume in asked.volumes]
        mounts = [
            {"name": volume.name, "mountPath": volume.mount_path, **({"readOnly": True} if volume.read_only else {})}
            for volume in asked.volumes
        ]
        names = [container["name"] for container in pod_spec(job).get("containers") or []]
        pod["containers"] = [{"name": name, "volumeMounts": mounts} for name in names]
    return pod


def _toleration(toleration: Toleration) -> Manifest:
    fields = {
        "key": toleration.key, "operator": toleration.operator, "value": toleration.value, "effect": toleration.effect,
        "tolerationSeconds": toleration.toleration_seconds,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


def _volume(volume: Volume) -> Manifest:
    if volume.persistent_volume_claim is not None:
        claim = {"claimName": volume.persistent_volume_claim, **({"readOnly": True} if volume.read_only else {})}
        return {"name": volume.name, "persistentVolumeClaim": claim}
    if volume.secret is not None:
        return {"name": volume.name, "secret": {"secretName": volume.secret}}
    return {"name": volume.name, "configMap": {"name": volume.config_map}}


def _env(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": literal_text(value)} for name, value in sorted(variables.items())]


def literal_text(text: str) -> str:
    """Text that Kubernetes hands on as it is: it would replace `$(NAME)` and `$$` in arguments and variables."""
    return re.sub(r"\$(?=[$(])", lambda _: "$$", text)


def to_yaml(manifest: Manifest) -> str:
    """A manifest as YAML that every parser, YAML 1.1 or 1.2, reads as the same data."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)


class _Dumper(yaml.SafeDumper):
    """Quotes what one YAML version takes for a string and another for a number or a truth value."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's hook
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's hook
        return True


_PLAIN = re.compile(r"^(--)?[A-Za-z/][^\n]*$")
_WORDS = re.compile(r"^(y|n|yes|no|on|off|true|false|null)$", re.IGNORECASE)


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    readable = "'" if '"' in text and text.isprintable() else '"'
    style = None if _PLAIN.match(text) and not _WORDS.match(text) else readable
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)
