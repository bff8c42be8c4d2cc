"""What the command line prints when a job has ended: the answers before and after, the proofs, or why it failed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blueprints.backends.results import Run
from blueprints.backends.state import JobStatus, seconds_between
from blueprints.cli.live import duration
from blueprints.measures import measures, results

SHOWN_SAMPLES = 5
SHOWN_FAULTS = 20
_PIPE_WIDTH = 120


def print_results(status: JobStatus, output: str, run: Run | None) -> None:
    """The result of a complete job, which lies in `output`, on standard output."""
    print()
    if run is not None:
        _print_samples(run.samples[:SHOWN_SAMPLES])
        for line in [*_measures(run.metrics), *_proofs(run.proofs)]:
            print(line)
        for kind in ("adapter", "model"):
            if kind in run.artifacts:
                print(f"{kind:<21}{run.artifacts[kind]}")
    report = Path(output) / "report.html"
    print(f"{'report':<21}{report}" if report.is_file() else f"{'output':<21}{output}")
    seconds = seconds_between(status.started, status.ended)
    print(f"{'done':<21}{status.name} is complete, {duration(seconds or 0)} in all")


def _print_samples(samples: list[dict[str, Any]]) -> None:
    if not samples:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    table = Table(title="Held-out prompts", title_justify="left", show_lines=True)
    for column in ("prompt", "expected", "before", "after"):
        table.add_column(column, overflow="fold", ratio=3 if column == "prompt" else 2)
    for sample in samples:
        expected, after = str(sample.get("reference", "")), str(sample.get("after", ""))
        right = after.strip() == expected.strip()
        table.add_row(
            Text(str(sample.get("prompt", "")).strip()),
            Text(expected),
            Text(str(sample.get("before", ""))),
            Text(after, "green" if right else ""),
        )
    console.print(table)


def _measures(metrics: Mapping[str, Any]) -> list[str]:
    lines = [f"{found.label:<21}{found.before} before, {found.after} after" for found in measures(metrics)]
    lines += [f"{text:<21}{value}" for text, value in results(metrics)]
    pace = metrics.get("tokens_per_second")
    if isinstance(pace, int | float):
        lines.append(f"{'pace':<21}{pace:,.0f} tokens/s in training")
    return lines


def _proofs(proofs: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, found in proofs.items():
        if not isinstance(found, dict):
            continue
        if "passed" not in found:
            rows = f": {len(found['rows'])} rows shown in the log" if isinstance(found.get("rows"), list) else ""
            lines.append(f"{'proof':<21}{name} passed{rows}")
            continue
        verdict = "passed" if found["passed"] else "FAILED"
        details = ""
        if isinstance(found.get("difference"), int | float) and isinstance(found.get("bound"), int | float):
            details = f": logits differ by at most {found['difference']:.2g} (allowed {found['bound']:.2g})"
        lines.append(f"{'proof':<21}{name} {verdict}{details}")
    return lines


def print_failure(status: JobStatus, log: str | None) -> None:
    """Why a job failed, on standard error: the step's own words, else the end of its log; `log`: where that is."""
    if status.reason == "Stopped":
        lines = [f"job {status.name} was {status.message}"]
    else:
        lines = [f"error: job {status.name} failed: {status.message or status.reason}"]
    step = next((step for step in status.steps if step.name == status.failed_step), None)
    cause = (step.failure if step else None) or {}
    if cause.get("where"):
        lines.append(f"  at {cause['where']}")
    faults = [fault for fault in cause.get("faults") or [] if isinstance(fault, dict)]
    lines += [f"  {_fault(fault)}" for fault in faults[:SHOWN_FAULTS]]
    if len(faults) > SHOWN_FAULTS or cause.get("faults_left_out"):
        lines.append("  ... more in the log")
    if cause.get("log"):
        lines += ["  the end of its log:", *(f"  | {line}" for line in str(cause["log"]).splitlines()[-12:])]
    if status.todo:
        lines.append(f"  -> {status.todo}")
    if log is not None:
        lines.append(f"  log: {log}")
    print("\n".join(lines), file=sys.stderr)


def _fault(fault: Mapping[str, Any]) -> str:
    text = ": ".join(str(fault[key]) for key in ("where", "key", "problem") if fault.get(key))
    expected = f"; expected {fault['expected']}" if fault.get("expected") else ""
    return f"{text}{expected}{'. ' + str(fault['hint']) if fault.get('hint') else ''}"
