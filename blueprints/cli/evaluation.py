"""`blueprints eval`: the base model of a finished job beside the tuned one, on any rows."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blueprints.backends.local import LocalBackend
from blueprints.backends.processes import add_package_path
from blueprints.backends.state import COMPLETE, JobDirectory
from blueprints.errors import DataError, EnvironmentFault, ExitCode, RecipeError, UsageError
from blueprints.measures import label
from blueprints.recipe import load_recipe
from blueprints.recipe.describe import choices_of
from blueprints.recipe.schema import Recipe, field_of_block
from blueprints.recipe.uris import uri_fault
from blueprints.recipe.write import recipe_text

HELD_OUT = "held-out"
"""What the job's own held-out rows are called."""
KEPT = ("uri", "revision", "dtype", "attn_implementation", "trust_remote_code", "chat_template", "added_tokens")
"""Keys of the model that rows of another data set are prepared with too."""


def evaluate(args: argparse.Namespace) -> int:
    """`blueprints eval`: prepare rows, measure both models in a process of their own, show both."""
    _check_options(args)
    directory = LocalBackend().directory(args.name)
    recipe = _finished(directory)
    request = _request(args, directory, recipe)
    place = directory.output / "evals" / _slug(args, request)
    place.mkdir(parents=True, exist_ok=True)
    result = place.with_suffix(".json")
    result.unlink(missing_ok=True)
    if not args.tasks:
        code = _rows(args, directory, recipe, place, request)
        if code:
            return code
    request["result"] = str(result)
    (place / "request.json").write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
    code = _run([sys.executable, "-m", "trainers.evaluation", str(place / "request.json")], {})
    if code:
        return code
    found = json.loads(result.read_text(encoding="utf-8"))
    if args.json:
        print(json.dumps(found | {"result": str(result)}, indent=2, ensure_ascii=False))
    else:
        _show(args.name, found, result)
    return int(ExitCode.DONE)


def _finished(directory: JobDirectory) -> Recipe:
    """The recipe of a job that is complete.

    Raises:
        UsageError: it is not, or left no artifact.
    """
    status = directory.read_status()
    if status.state != COMPLETE:
        raise UsageError(
            f"the job is {status.state}: there is no tuned model to compare yet",
            where=f"job {directory.name}",
            todo=f"wait for it with `blueprints wait {directory.name}`",
        )
    try:
        record = json.loads((directory.output / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"its output cannot be read: {error}",
            where=f"job {directory.name}",
            todo="only jobs of recipes can be evaluated",
        ) from None
    plain = {key: value for key, value in record["recipe"].items() if value is not None}
    return load_recipe(None, base=_without_idle(plain), environ={}).recipe


def _without_idle(plain: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe as one that may be loaded: `recipe_text` leaves out what does nothing."""
    import yaml

    found: dict[str, Any] = yaml.safe_load(recipe_text(Recipe.model_validate(_pruned(plain))))
    return found


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    return value


def _check_options(args: argparse.Namespace) -> None:
    """The options go together.

    Raises:
        UsageError: they do not, a metric is unknown, or `--dataset` is no source.
    """
    for option, given, needs, there in (
        ("--tasks", args.tasks, "--harness lm_eval", args.harness),
        ("--harness", args.harness, "--tasks", args.tasks),
        ("--include-path", args.include_path, "--tasks", args.tasks),
        ("--split", args.split, "--dataset", args.dataset),
    ):
        if given and not there:
            raise UsageError(f"{option} needs {needs}", where="blueprints eval", todo="see `blueprints eval --help`")
    if args.tasks and (args.dataset or args.metric):
        raise UsageError(
            "--tasks brings rows and metrics of its own",
            where="blueprints eval",
            todo="leave --dataset and --metric out",
        )
    wrong = uri_fault(args.dataset, dataset=True) if args.dataset is not None else None
    if wrong is not None:
        raise UsageError(f"{wrong.problem}; expected {wrong.expected}", where="--dataset", todo=wrong.hint)
    _check_metrics(args.metric or [])


def _request(args: argparse.Namespace, directory: JobDirectory, recipe: Recipe) -> dict[str, Any]:
    """What `trainers.evaluation` is asked."""
    own = [] if recipe.eval.metric == "none" else [recipe.eval.metric]
    return {
        "output": str(directory.output),
        "model": str(directory.workspace / "model"),
        "metrics": list(dict.fromkeys(args.metric or own)),
        "max_rows": args.max_rows or recipe.eval.max_rows,
        "max_new_tokens": args.max_new_tokens or recipe.eval.max_new_tokens,
        "batch_size": recipe.training.per_device_eval_batch_size,
        "samples": recipe.eval.samples,
        "tasks": [task for task in (args.tasks or "").split(",") if task],
        "limit": args.max_rows,
        "include_path": args.include_path and str(Path(args.include_path).absolute()),
    }


def _check_metrics(names: Sequence[str]) -> None:
    found = field_of_block("eval", "metric")
    assert found is not None
    known = [name for name in choices_of(found) if name != "none"]
    for name in names:
        if name not in known and ":" not in name:
            raise UsageError(
                f"there is no metric {name!r}",
                where="--metric",
                todo=f"one of {', '.join(known)}, or package.module:function",
            )


def _slug(args: argparse.Namespace, request: Mapping[str, Any]) -> str:
    """The result's name: what was evaluated on, and a digest of how."""
    what = "lm_eval-" + "-".join(request["tasks"]) if request["tasks"] else args.dataset or HELD_OUT
    asked = json.dumps([args.dataset, args.split, *(request[key] for key in sorted(request))], sort_keys=True)
    words = re.sub(r"[^a-zA-Z0-9]+", "-", what).strip("-")[:60]
    return f"{words}-{hashlib.sha256(asked.encode()).hexdigest()[:6]}"


# -- rows


def _rows(
    args: argparse.Namespace, directory: JobDirectory, recipe: Recipe, place: Path, request: dict[str, Any]
) -> int:
    """Let `request` name prepared rows: the job's held-out ones, or those of `--dataset`; an exit code where that fails."""
    request["recipe"] = str(place / "recipe.yaml")
    if args.dataset is None:
        request["dataset"] = str(directory.workspace / "dataset")
        (place / "recipe.yaml").write_text(recipe_text(recipe), encoding="utf-8")
        prepared = _manifest(directory).get("prepared", {})
        if "eval" not in prepared.get("splits", {}):
            raise DataError(
                "the job held no rows out", where=f"job {directory.name}", todo="name rows with --dataset URI"
            )
        return 0
    request["dataset"] = str(place / "dataset")
    model = place / "model"
    if not model.is_symlink():
        model.symlink_to(os.path.relpath(directory.workspace / "model", place))
    code = 0
    for attempt in _recipes(args, recipe, request["max_rows"]):
        (place / "recipe.yaml").write_text(recipe_text(attempt), encoding="utf-8")
        variables = {
            "BLUEPRINTS_WORKSPACE": str(place),
            "BLUEPRINTS_RECIPE": str(place / "recipe.yaml"),
            "STORAGE_URI": attempt.dataset.uri,
        }
        code = _run([sys.executable, "-m", "initializers", "dataset"], variables)
        if code not in (int(ExitCode.USER_INPUT), int(ExitCode.INVALID_DATA)):
            break
        if attempt.method != "sft":
            print("trying them as questions with answers", file=sys.stderr)
    return code


def _manifest(directory: JobDirectory) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(
            (directory.workspace / "dataset" / "_manifest.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return {}
    return found


def _recipes(args: argparse.Namespace, recipe: Recipe, rows: int) -> Iterator[Recipe]:
    """How the rows may be prepared: as the job's method wants them, else as questions with answers.

    Raises:
        UsageError: the URI or the split is wrong.
    """
    same = args.dataset == recipe.dataset.uri
    dataset: dict[str, Any] = {
        "uri": args.dataset, "max_rows": rows, "overlong": "drop",
        **({"columns": recipe.dataset.columns, "format": recipe.dataset.format} if same else {}),
        **({"split": args.split, "test_size": 0} if args.split else {}),
    }  # fmt: skip
    model = {
        key: value for key, value in recipe.model.model_dump(mode="json", exclude_none=True).items() if key in KEPT
    }
    training = {"max_length": recipe.training.max_length}
    common = {"model": model, "dataset": dataset, "training": training}
    own = recipe.method in ("dpo", "grpo", "ppo")
    try:
        if own:
            block = dict(recipe)[recipe.method].model_dump(mode="json", exclude_none=True, exclude_unset=True)
            yield load_recipe(None, base={"method": recipe.method, recipe.method: block, **common}, environ={}).recipe
        yield load_recipe(None, base={"method": "sft", **common}, environ={}).recipe
    except RecipeError as error:
        raise UsageError("; ".join(str(fault) for fault in error.faults), where="blueprints eval") from None


# -- running and showing


def _run(command: list[str], variables: Mapping[str, str]) -> int:
    """Run a step in a session of its own, its output on standard error; Ctrl-C ends it.

    Returns:
        its exit code; what is wrong has been said.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("BLUEPRINTS_", "LORA_CONFIG"))
    }
    add_package_path(environment)
    environment |= {"PYTHONUNBUFFERED": "1", **variables}
    try:
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr.fileno(), start_new_session=True)
    except OSError as error:
        raise EnvironmentFault(f"cannot start: {error.strerror}", where=command[0]) from None
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return code if code >= 0 else int(ExitCode.JOB_FAILED)


def _show(name: str, found: Mapping[str, Any], result: Path) -> None:
    rows = [("", "base", "tuned")]
    for measure, before in found["base"].items():
        text, style = label(measure)
        rows.append((text, f"{before:{style}}", f"{found['tuned'][measure]:{style}}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    what = ", ".join(found["tasks"]) if "tasks" in found else f"{found['rows']} rows of {found['source']}"
    print(f"{name} on {what}")
    for row in rows:
        print(f"  {row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}".rstrip())
    print(f"result: {result}")
