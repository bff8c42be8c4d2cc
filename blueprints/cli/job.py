"""The verbs about jobs: train, render, jobs, get, logs, wait, delete."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from blueprints.backends.local import ALREADY_COMPLETE, RESUMED, LocalBackend, require_libraries, require_processes
from blueprints.backends.results import Run, read_run
from blueprints.backends.state import COMPLETE, JobDirectory, JobStatus, seconds_between
from blueprints.cli.live import View, describe, duration, elapsed, open_view, progress_of
from blueprints.cli.outcome import print_failure, print_results
from blueprints.errors import EnvironmentFault, ExitCode, JobFailedError, UsageError
from blueprints.jobset import build_objects
from blueprints.manifests import require_valid
from blueprints.recipe import LoadedRecipe, load_recipe
from blueprints.resolve import ResolvedJob, Step, resolve
from blueprints.runtimes import Manifest, shared_claim_note
from blueprints.trainjob import default_name, runtime_for, to_yaml, train_job

POLL_SECONDS = 0.2


def train(args: argparse.Namespace) -> int:
    """`blueprints train`: run a recipe as a job and follow it."""
    loaded = _load(args)
    runtime = runtime_for(loaded.recipe)
    name = default_name(loaded, runtime, unique=True) if args.name is None else args.name
    job = train_job(loaded, runtime, name=name)
    require_valid(job, runtime)
    if args.dry_run:
        require_processes(runtime)
        return _dry_run(job, resolve(job, runtime), as_json=args.json)
    backend = LocalBackend()
    stream = sys.stderr if args.json else sys.stdout
    with _Signals() as signals:
        outcome = backend.start(job, runtime, resume=_resume_command(args, name))
        directory = backend.directory(name)
        if args.detach and outcome != ALREADY_COMPLETE:
            return _detached(backend, name, as_json=args.json)
        _say_started(stream, outcome, directory)
        if outcome == ALREADY_COMPLETE:
            status = directory.read_status()
        else:
            status = _follow(backend, directory, open_view(stream), signals)
    if signals.detach:
        print(f"the job goes on: `blueprints logs {name} --follow`", file=sys.stderr)
        return int(ExitCode.TERMINATED)
    _show_end(status, directory, as_json=args.json)
    return int(ExitCode.INTERRUPTED if signals.interrupts and status.exit_code else status.exit_code or 0)


def render(args: argparse.Namespace) -> int:
    """`blueprints render`: the TrainJob, or what the cluster makes of it, as YAML."""
    loaded = _load(args)
    runtime = runtime_for(loaded.recipe)
    job = train_job(loaded, runtime, name=args.name)
    require_valid(job, runtime)
    if note := shared_claim_note(runtime, loaded.recipe.resources.num_nodes):
        print(f"note: {note}", file=sys.stderr)
    objects = build_objects(job, runtime) if args.jobset else [job]
    text = "---\n".join(to_yaml(item) for item in objects)
    if args.output is None:
        sys.stdout.write(text)
    else:
        try:
            args.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write: {error.strerror}", where=f"--output {args.output}") from None
    return 0


def jobs(args: argparse.Namespace) -> int:
    """`blueprints jobs`: all jobs, the newest first."""
    backend = LocalBackend()
    found = backend.jobs()
    if args.json:
        _print_json([_as_json(status, backend.directory(status.name)) for status in found])
        return 0
    if not found:
        print(f"no jobs in {backend.jobs_directory}", file=sys.stderr)
        return 0
    rows = [("NAME", "STATE", "RUNTIME", "AGE", "TIME", "WHAT")]
    for status in found:
        age, ran = seconds_between(status.created, None), seconds_between(status.started, status.ended)
        rows.append(
            (
                status.name,
                status.state,
                status.runtime,
                duration(age or 0),
                "" if ran is None else duration(ran),
                _what(status),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip())
    return 0


def get(args: argparse.Namespace) -> int:
    """`blueprints get`: one job."""
    backend = LocalBackend()
    directory = backend.directory(args.name)
    status = directory.read_status()
    if args.json:
        _print_json(_as_json(status, directory))
        return 0
    ran = seconds_between(status.started, status.ended)
    print(f"{status.name}: {status.state}{f' ({status.reason})' if status.reason and status.state != COMPLETE else ''}")
    print(f"  runtime    {status.runtime}, {status.num_nodes} node{'' if status.num_nodes == 1 else 's'}")
    print(f"  created    {status.created}{f', ran {duration(ran)}' if ran is not None else ''}")
    print(f"  directory  {directory.path}")
    reports = progress_of(directory, status)
    for step in status.steps:
        code = "" if step.exit_code is None else f", exit code {step.exit_code}"
        attempts = f", attempt {step.attempts}" if step.attempts > 1 else ""
        report = reports.get(step.name) if step.status == "Running" else None
        doing = f", {report['phase']} {describe(report)}".rstrip() if report else ""
        print(f"  {step.name:<20} {step.status:<10} {elapsed(step):>8}{code}{attempts}{doing}")
    _show_end(status, directory, as_json=False)
    return 0


def logs(args: argparse.Namespace) -> int:
    """`blueprints logs`: what the steps printed."""
    lines = LocalBackend().logs(args.name, [args.step] if args.step else [], follow=args.follow)
    for step, line in lines:
        print(line if args.step else f"[{step}] {line}", flush=args.follow)
    return 0


def wait(args: argparse.Namespace) -> int:
    """`blueprints wait`: the job's outcome as exit code."""
    backend = LocalBackend()
    try:
        status = backend.wait(args.name, timeout=args.timeout)
    except TimeoutError as error:
        raise JobFailedError(str(error), todo=f"`blueprints get {args.name}` shows where it is") from None
    _show_end(status, backend.directory(args.name), as_json=args.json, brief=True)
    return int(status.exit_code or 0)


def delete(args: argparse.Namespace) -> int:
    """`blueprints delete`: remove jobs with all their files."""
    backend = LocalBackend()
    for name in args.names:
        backend.directory(name)  # before the first one is gone, see that all of them exist
    for name in dict.fromkeys(args.names):
        backend.delete(name, force=args.force)
        print(f"deleted {name}")
    return 0


# -- starting


def _load(args: argparse.Namespace) -> LoadedRecipe:
    return load_recipe(args.recipe, overlays=args.files, overrides=args.overrides)


def _resume_command(args: argparse.Namespace, name: str) -> str:
    files = [word for file in args.files for word in ("-f", str(file))]
    command = shlex.join(["blueprints", "train", args.recipe, *files, *args.overrides, "--name", name])
    layer = os.environ.get("LORA_CONFIG", "").strip()
    return f"LORA_CONFIG={shlex.quote(layer)} {command}" if layer else command


def _say_started(stream: TextIO, outcome: str, directory: JobDirectory) -> None:
    if outcome == ALREADY_COMPLETE:
        print(f"job {directory.name} is complete already: same name, same recipe", file=stream)
        return
    went_on = "goes on where it stopped" if outcome == RESUMED else "started"
    print(f"job {directory.name} {went_on}; its files: {directory.path}", file=stream, flush=True)


def _detached(backend: LocalBackend, name: str, *, as_json: bool) -> int:
    directory = backend.directory(name)
    if as_json:
        _print_json(_as_json(directory.read_status(), directory))
        return 0
    print(name)
    print(f"  follow it   blueprints logs {name} --follow")
    print(f"  its state   blueprints get {name}")
    print(f"  wait for it blueprints wait {name}")
    print(f"  stop it     blueprints delete {name} --force")
    return 0


def _dry_run(job: Manifest, resolved: ResolvedJob, *, as_json: bool) -> int:
    steps = [{"name": step.name, "command": step.argv, "env": _literal_env(step)} for step in resolved.steps]
    if as_json:
        _print_json({"name": resolved.name, "trainJob": job, "steps": steps})
    else:
        sys.stdout.write(to_yaml(job))
        print("# What it runs on this machine:")
        for step in resolved.steps:
            after = ", ".join(dict.fromkeys(dependency.replicated_job for dependency in step.depends_on))
            print(f"# {step.name}{f' (after {after})' if after else ''}")
            for key, value in _literal_env(step).items():
                print(f"#   {key}={shlex.quote(value)}")
            print(f"#   {shlex.join(step.argv)}")
    try:
        require_libraries(resolved)
    except EnvironmentFault as fault:
        print(f"note: {fault}", file=sys.stderr)
    return 0


def _literal_env(step: Step) -> dict[str, str]:
    return {variable.name: variable.value for variable in step.env if variable.value is not None}


# -- following


class _Signals:
    """What is asked of this process while it follows a job, noted and not acted on in the middle of a line.

    Ctrl-C is counted; SIGTERM and SIGHUP ask to let go of the job, which goes on.
    """

    def __init__(self) -> None:
        self.interrupts = 0
        self.detach = False

    def __enter__(self) -> _Signals:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number, handler in self._before.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup means: stay
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 2:  # not even the kill helped: do not hold the terminal
                raise KeyboardInterrupt
        else:
            self.detach = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def _closing(view: View) -> Iterator[View]:
    try:
        yield view
    finally:
        view.close()


def _follow(backend: LocalBackend, directory: JobDirectory, view: View, signals: _Signals) -> JobStatus:
    """Show the job until it has ended or the client is told to let go; hand Ctrl-C on to it."""
    handled = 0
    notes: list[str] = []
    with _closing(view):
        while True:
            status = directory.read_status()
            for note in status.notes:
                if note not in notes:
                    view.say(f"note: {note}")
                    notes.append(note)
            view.update(status, progress_of(directory, status))
            if status.finished or signals.detach:
                return status
            if signals.interrupts > handled:
                handled = signals.interrupts
                view.say("stopping gracefully (Ctrl-C again to kill)" if handled == 1 else "killing the job")
                backend.stop(directory.name, kill=handled > 1)
            time.sleep(POLL_SECONDS)


# -- the end


def _show_end(status: JobStatus, directory: JobDirectory, *, as_json: bool, brief: bool = False) -> None:
    if as_json:
        _print_json(_as_json(status, directory))
    elif status.state == COMPLETE:
        if brief:
            print(f"{status.name}: {status.state}; output: {directory.output}")
        else:
            print_results(status, directory, read_run(directory))
    elif status.finished:
        print_failure(status, directory)


def _what(status: JobStatus) -> str:
    if status.state == COMPLETE:
        return ""
    if status.finished:
        return f"{status.reason}: {status.message}"
    running = [step.name for step in status.steps if step.status == "Running"]
    return ", ".join(running)


def _as_json(status: JobStatus, directory: JobDirectory) -> dict[str, Any]:
    run: Run | None = read_run(directory)
    seconds = seconds_between(status.started, status.ended)
    report = directory.output / "report.html"
    return {
        **status.as_dict(),
        "status": status.state,
        "seconds": None if seconds is None else round(seconds, 1),
        "directory": str(directory.path),
        "workspace": str(directory.workspace),
        "output": str(directory.output) if directory.output.is_dir() else None,
        "report": str(report) if report.is_file() else None,
        "artifacts": dict(run.artifacts) if run else {},
        "metrics": dict(run.metrics) if run else {},
        "proofs": dict(run.proofs) if run else {},
        "progress": progress_of(directory, status),
    }


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
