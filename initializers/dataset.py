"""The dataset step: source → `dataset/`, with `prepared/` when a recipe says what for."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blueprints.digests import digest, tokenizer_digest
from blueprints.errors import DataError, Fault, RowsError, UsageError
from blueprints.progress import Progress
from blueprints.recipe.rows import row_options, samples, wants_answers
from blueprints.recipe.schema import Recipe
from initializers.duplicates import Duplicates
from initializers.formats import check_columns
from initializers.prepare import Plan, Preparer, held_out, make_plan, split_rows, write_splits
from initializers.prompts import needed_columns
from initializers.sequences import SplitReport
from initializers.settings import Request, Settings
from initializers.sources import Resolved, source_for
from initializers.sources.file import local_path
from initializers.sources.types import PREPARED
from initializers.tokens import ChatTokenizer, load_tokenizer
from initializers.workspace import Area, link_file

FETCH_VERSION = 1
"""Raise it when a fetch would bring other files for the same request."""
FAULTS_FILE = "dataset.faults.json"
PACKAGES = ("transformers", "tokenizers", "jinja2")
"""Libraries whose version is part of the preparation's fingerprint."""


def say(text: str) -> None:
    """One line for the log."""
    print(text, flush=True)


def run_dataset(settings: Settings, progress: Progress) -> int:
    """Make `dataset/` complete for these settings; does nothing if it is already.

    Raises:
        UsageError: the source or the recipe cannot be used.
        DataError: the data set is invalid; RowsError lists its rows' faults.
        EnvironmentFault: network, disk or permissions.
    """
    area = Area(settings.workspace, "dataset")
    if settings.recipe is not None:
        check_columns(settings.recipe.dataset.columns)
    with area.locked():
        fetched = fetch_fingerprint(settings.request)
        old = area.manifest()
        reusable = old is not None and _source_is_whole(area, old, fetched)
        wanted = None
        if old is not None and reusable:
            wanted = None if settings.recipe is None else prepare_fingerprint(settings, old["files"])
            if _is_done(area, old, wanted):
                say(f"nothing to do: {area.path} is complete for these inputs")
                progress.update("done", message="nothing to do")
                return 0
        with area.building() as temporary:
            if old is not None and reusable:
                manifest = _relink(area, old, temporary)
            else:
                manifest = fetch(settings.request, temporary, fetched, progress)
            if settings.recipe is not None:
                wanted = wanted or prepare_fingerprint(settings, manifest["files"])
                manifest |= _prepare(settings, settings.recipe, temporary, manifest, wanted, progress)
            area.publish(temporary, manifest)
        (settings.workspace / FAULTS_FILE).unlink(missing_ok=True)
    progress.update("done", message="dataset ready")
    say(f"done: {area.path}")
    return 0


def fetch_fingerprint(request: Request) -> str:
    """Fingerprint of what a fetch depends on."""
    return digest(
        {
            "version": FETCH_VERSION,
            "uri": request.uri,
            "revision": request.revision,
            "ignore_patterns": sorted(request.ignore_patterns),
            "trust_remote_code": request.trust_remote_code,
            "source": source_for(request.uri).inputs(request),
        }
    )


def prepare_fingerprint(settings: Settings, files: list[dict[str, Any]]) -> str:
    """Fingerprint of what the preparation depends on: rows, recipe, tokenizer, code."""
    recipe = settings.recipe
    assert recipe is not None
    dataset = recipe.dataset.model_dump(mode="json", exclude={"uri", "revision", "max_faults", "ignore_patterns"})
    return digest(
        {
            "files": [[item["path"], item["sha256"]] for item in files],
            "dataset": dataset,
            "method": recipe.method,
            "options": row_options(recipe),
            "needed": needed_columns(recipe),
            "distill": None if recipe.distill is None else [samples(recipe), wants_answers(recipe)],
            "max_length": recipe.training.max_length,
            "seed": recipe.training.data_seed,
            "chat_template": recipe.model.chat_template,
            "added_tokens": recipe.model.added_tokens,
            "tokenizer": tokenizer_digest(settings.workspace / "model"),
            "code": _code_digest(),
            "packages": {name: version(name) for name in PACKAGES},
        }
    )


def _code_digest() -> str:
    sha = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


def _source_is_whole(area: Area, manifest: Mapping[str, Any], fingerprint: str) -> bool:
    if manifest.get("fingerprint") != fingerprint:
        say("the source or its settings changed: fetching again")
        return False
    damage = area.damage(manifest["files"])
    if damage:
        say(f"{area.path} is damaged ({damage}): fetching again")
    return not damage


def _is_done(area: Area, manifest: Mapping[str, Any], wanted: str | None) -> bool:
    prepared = manifest.get("prepared")
    if wanted is None:
        return True
    if not isinstance(prepared, dict) or prepared.get("fingerprint") != wanted:
        if prepared:
            say("the recipe, the model or the code changed: preparing again")
        return False
    shards = [
        shard | {"path": f"{PREPARED}/{name}/{shard['path']}"}
        for name, split in prepared["splits"].items()
        for shard in split["shards"]
    ]
    damage = area.damage(shards)
    if damage:
        say(f"{area.path} is damaged ({damage}): preparing again")
    return not damage


def _relink(area: Area, manifest: Mapping[str, Any], temporary: Path) -> dict[str, Any]:
    """The files of the complete directory again, without fetching."""
    say("the source is unchanged: not fetched again")
    for item in manifest["files"]:
        link_file(area.path / item["path"], temporary / item["path"])
    kept = ("source", "requested_revision", "revision", "fingerprint", "files")
    return {key: manifest[key] for key in kept} | {"rows": None, "schema": None}


def fetch(request: Request, temporary: Path, fingerprint: str, progress: Progress) -> dict[str, Any]:
    """Fetch the source into `temporary`; returns what its manifest says about it."""
    say(f"fetching {request.uri}" + (f" at revision {request.revision}" if request.revision else ""))
    started = time.monotonic()

    def on_bytes(done: int, total: int | None) -> None:
        progress.update("download", done, total, unit="bytes", message=request.uri)

    resolved: Resolved = source_for(request.uri).fetch(request, temporary, on_bytes)
    size = sum(item.size for item in resolved.files)
    for note in resolved.notes:
        say(note)
    say(f"fetched {len(resolved.files)} files, {size:,} bytes in {time.monotonic() - started:.1f} s")
    return {
        "source": request.uri,
        "requested_revision": request.revision,
        "revision": resolved.revision,
        "fingerprint": fingerprint,
        "files": [item.as_dict() for item in resolved.files],
        "rows": None,
        "schema": None,
    }


# --- preparation -----------------------------------------------------------------------------------


def _prepare(
    settings: Settings,
    recipe: Recipe,
    directory: Path,
    manifest: Mapping[str, Any],
    fingerprint: str,
    progress: Progress,
) -> dict[str, Any]:
    files = {item["path"]: directory / item["path"] for item in manifest["files"]}
    plan = make_plan(files, recipe, single=is_single(settings.request, files))
    tokenizer = _tokenizer(settings, recipe)
    _say_plan(plan, tokenizer)
    started = time.monotonic()
    with Duplicates(directory) as seen:
        preparer = Preparer(recipe, plan.format, tokenizer, _row_progress("prepare", progress), seen)
        reports = write_splits(directory / PREPARED, plan, recipe, preparer)
    raise_faults(preparer, settings)
    _say_result(reports, tokenizer, time.monotonic() - started)
    template = tokenizer.template
    prepared = {
        "fingerprint": fingerprint,
        "method": recipe.method,
        "kind": preparer.kind,
        "format": plan.format.name,
        "max_length": recipe.training.max_length,
        **row_options(recipe),
        "splits": {name: report.as_dict() for name, report in reports.items()},
        "notes": asdict(tokenizer.notes),
        "tokenizer_sha256": tokenizer.files_sha256,
        "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "added_tokens": recipe.model.added_tokens or None,
        "vocab_size": len(tokenizer.tokenizer),
    }
    return {
        "rows": {name: report.rows for name, report in reports.items()},
        "schema": dict(plan.schema),
        "prepared": prepared,
    }


def is_single(request: Request, files: Mapping[str, Path]) -> bool:
    """Whether the user named one file, rather than a directory or a glob that holds one."""
    if len(files) != 1 or not request.uri.startswith("file://"):
        return False
    return local_path(request.uri).is_file()


def _tokenizer(settings: Settings, recipe: Recipe) -> ChatTokenizer:
    model = settings.workspace / "model"
    if not model.is_dir():
        raise DataError(
            "the model is not in the workspace, and rows are tokenised with its tokenizer",
            where=str(model),
            todo="run the model initializer first: python -m initializers model",
        )
    return load_tokenizer(
        model,
        chat_template=recipe.model.chat_template,
        completion_only=bool(row_options(recipe)["completion_only_loss"]),
        trust_remote_code=recipe.model.trust_remote_code,
        added=recipe.model.added_tokens,
    )


def _row_progress(phase: Any, progress: Progress) -> Any:
    def on_rows(split: str, rows: int) -> None:
        progress.update(phase, rows, None, unit="rows", message=f"{split} split")

    return on_rows


def _say_plan(plan: Plan, tokenizer: ChatTokenizer | None) -> None:
    for note in plan.notes:
        say(note)
    say(f"format: {plan.format.name}, because {plan.reason}")
    if tokenizer is not None:
        say(f"chat template: from {tokenizer.template_source}" if tokenizer.template_source else "chat template: none")


def _say_result(reports: Mapping[str, Any], tokenizer: ChatTokenizer, seconds: float) -> None:
    for name, report in reports.items():
        trained = f", {report.trained_tokens:,} of them trained" if report.trained_tokens else ""
        say(
            f"{name}: {report.rows:,} rows → {report.sequences:,} sequences, {report.tokens:,} tokens{trained}; "
            f"{report.truncated:,} rows truncated, "
            f"{report.dropped:,} dropped; longest row {report.longest:,} tokens"
        )
    _say_repeated(reports)
    notes = tokenizer.notes
    if notes.unrolled:
        say(
            f"note: the chat template rewrites earlier turns, so {notes.unrolled:,} conversations became one sequence "
            "per answer"
        )
    if notes.merged_boundaries:
        say(f"note: {notes.merged_boundaries:,} answers share their first token with the prompt; it carries loss")
    if notes.retokenised_prompts > notes.merged_boundaries:
        say(
            f"note: {notes.retokenised_prompts:,} of the first prompts have other tokens alone than before their answer"
        )
    if notes.extended:
        say(f"note: the template's marks leave out the end token of {notes.extended:,} answers; it carries loss too")
    if notes.ignored_reasoning:
        say(f"warning: the template does not show the reasoning_content of {notes.ignored_reasoning:,} answers")
    if notes.unended:
        say(f"warning: {notes.unended:,} answers do not end in a token that ends generation; the model may not stop")
    say(f"prepared in {seconds:.1f} s")


def _say_repeated(reports: Mapping[str, SplitReport]) -> None:
    """Warn of rows that count more than once, and of held-out rows that the model is trained on."""
    for name, report in reports.items():
        if report.duplicates:
            say(f"warning: {name}: {report.duplicates:,} rows repeat another row exactly")
        if report.leaked:
            say(
                f"warning: {name}: {report.leaked:,} rows are in the training split too, so their scores say nothing "
                "about unseen rows"
            )


def raise_faults(preparer: Preparer, settings: Settings, *, keep: bool = True) -> None:
    """Stop if there are faults; `keep` writes their list beside `dataset/` first.

    Raises:
        RowsError: with the faults.
    """
    faults, uri = preparer.faults, settings.request.uri
    if not faults.total:
        return
    if keep:
        path = settings.workspace / FAULTS_FILE
        write_faults(path, uri, faults.listed, faults.total, preparer.checked)
        say(f"the faults as JSON: {path}")
    more = faults.total - len(faults.listed)
    beyond = f"; {more:,} more faults beyond dataset.max_faults={faults.limit} are not listed" if more else ""
    raise RowsError(faults.listed, subject=f"data set {uri} ({preparer.checked:,} rows checked{beyond})")


def write_faults(path: Path, uri: str, faults: list[Fault], total: int, rows: int) -> None:
    """The machine-readable list of faults: `{"source", "rows_checked", "total", "faults": [...]}`."""
    content = {
        "source": uri,
        "rows_checked": rows,
        "total": total,
        "faults": [fault.as_dict() for fault in faults],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


# --- validation alone ------------------------------------------------------------------------------


def run_validate(settings: Settings, progress: Progress) -> int:
    """Check every row for the recipe, with tokens if the workspace has a model, and leave nothing behind.

    Raises:
        UsageError: there is no recipe, or it cannot be used.
        RowsError: the rows have faults.
    """
    recipe = settings.recipe
    if recipe is None:
        raise UsageError(
            "BLUEPRINTS_RECIPE is not set: rows are valid for a recipe",
            where="environment",
            todo="set BLUEPRINTS_RECIPE to a shipped recipe (sft-lora) or a YAML file",
        )
    with tempfile.TemporaryDirectory(prefix="blueprints-validate-") as scratch:
        files = source_for(settings.request.uri).local_files(settings.request)
        if files is None:
            fetched = fetch(settings.request, Path(scratch), "", progress)
            files = {item["path"]: Path(scratch) / item["path"] for item in fetched["files"]}
        plan = make_plan(files, recipe, single=is_single(settings.request, files))
        tokenizer = _tokenizer(settings, recipe) if (settings.workspace / "model").is_dir() else None
        _say_plan(plan, tokenizer)
        with Duplicates(Path(scratch)) as seen:
            preparer = Preparer(recipe, plan.format, tokenizer, _row_progress("validate", progress), seen)
            reports = {
                name: preparer.split(name, rows(), None)
                for name, rows in split_rows(plan, recipe, held_out(plan, recipe)).items()
            }
        raise_faults(preparer, settings, keep=False)
    _say_valid(settings.request.uri, plan, reports, tokenizer)
    progress.update("done", message="data set is valid")
    return 0


def _say_valid(uri: str, plan: Plan, reports: Mapping[str, SplitReport], tokenizer: ChatTokenizer | None) -> None:
    rows = ", ".join(f"{name} {report.rows:,}" for name, report in reports.items())
    tokens = "" if tokenizer is None else f"; longest row {max(item.longest for item in reports.values()):,} tokens"
    total = sum(report.rows for report in reports.values())
    _say_repeated(reports)
    say(f"valid: {uri}: {total:,} rows ({rows}), format {plan.format.name}{tokens}")
