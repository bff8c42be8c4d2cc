"""`blueprints runtimes`: the shipped runtimes, and what a cluster has of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from blueprints.errors import ManifestError, UsageError
from blueprints.kustomize import FILE, build
from blueprints.manifests import check_runtime
from blueprints.runtimes import (
    METHOD,
    Manifest,
    find_runtime,
    recipe_of,
    replicated_jobs,
    runtimes_directory,
    short_name,
    trainer_container,
)
from blueprints.trainjob import to_yaml

_OPTIONS = {
    "output": ("render",),
    "kubeconfig": ("diff", "apply"),
    "context": ("diff", "apply"),
    "dry_run": ("apply",),
    "json": ("list",),
}
"""The actions that an option belongs to; the others refuse it."""


def run(args: argparse.Namespace) -> int:
    """The action named first on the command line."""
    for option, actions in _OPTIONS.items():
        if vars(args)[option] not in (None, False) and args.action not in actions:
            flag = f"--{option.replace('_', '-')}"
            todo = f"it belongs to {' and '.join(actions)}"
            raise UsageError(f"{flag} means nothing to {args.action}", where="blueprints runtimes", todo=todo)
    manifests = _selected(args)
    return {"list": _list, "render": _render, "diff": _diff, "apply": _apply}[args.action](args, manifests)


def _selected(args: argparse.Namespace) -> list[Manifest]:
    """The runtimes of the chosen set, valid, and only those named if any are."""
    manifests = build(_folder(args))
    if not args.names:
        chosen = manifests
    else:
        found = {name: find_runtime(name, manifests) for name in args.names}
        if unknown := [name for name, manifest in found.items() if manifest is None]:
            todo = f"there are {', '.join(short_name(manifest) for manifest in manifests)}"
            raise UsageError(f"no runtime {unknown[0]!r}", where="blueprints runtimes", todo=todo)
        chosen = [manifest for manifest in found.values() if manifest is not None]
    if faults := [fault for manifest in chosen for fault in check_runtime(manifest)]:
        raise ManifestError(faults, subject="runtimes")
    return chosen


def _folder(args: argparse.Namespace) -> Path:
    root = runtimes_directory()
    if args.generic:
        return root / "generic"
    if args.overlay is None:
        return root
    known = sorted(path.name for path in (root / "overlays").iterdir())
    for folder in (root / "overlays" / args.overlay, Path(args.overlay)):
        if (folder / FILE).is_file():
            return folder
    todo = f"shipped overlays: {', '.join(known)}; or the folder of a kustomization of your own"
    raise UsageError(f"there is no overlay {args.overlay!r}", where="--overlay", todo=todo)


def _list(args: argparse.Namespace, manifests: list[Manifest]) -> int:
    rows = [
        {
            "name": short_name(manifest),
            "installed_as": manifest["metadata"]["name"],
            "method": manifest["metadata"]["labels"].get(METHOD),
            "recipe": recipe_of(manifest),
            "steps": [job["name"] for job in replicated_jobs(manifest)],
            "image": (trainer_container(manifest) or {}).get("image"),
        }
        for manifest in manifests
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = [("NAME", "IN A CLUSTER", "RECIPE", "STEPS")]
    table += [(row["name"], row["installed_as"], row["recipe"] or "", ", ".join(row["steps"])) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(3)]
    for line in table:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip())
    return 0


def _render(args: argparse.Namespace, manifests: list[Manifest]) -> int:
    text = "---\n".join(map(to_yaml, manifests))
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=f"--output {args.output}") from None
    return 0


def _diff(args: argparse.Namespace, manifests: list[Manifest]) -> int:
    from blueprints.install import Cluster, plan

    changes = plan(Cluster(args.kubeconfig, args.context), manifests)
    for change in changes:
        if change.diff:
            print(change.diff)
    counts = [f"{sum(c.state == state for c in changes)} {state}" for state in ("new", "changed", "unchanged")]
    print(", ".join(counts), file=sys.stderr)
    return 0


def _apply(args: argparse.Namespace, manifests: list[Manifest]) -> int:
    from blueprints.install import Change, Cluster, install, plan

    cluster = Cluster(args.kubeconfig, args.context)
    changes = plan(cluster, manifests)
    said = {"new": "created", "changed": "changed", "unchanged": "unchanged"}

    def tell(change: Change) -> None:
        print(f"{change.name} {said[change.state]}{' (dry run)' if args.dry_run else ''}", flush=True)

    if args.dry_run:
        for change in changes:
            tell(change)
        return 0
    install(cluster, changes, tell)
    return 0
