"""The verbs about jobs: train, render, jobs, get, logs, events, wait, suspend, resume, delete."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC
from types import FrameType
from typing import Any, TextIO

from blueprints.backends.base import Backend, open_backend
from blueprints.backends.local import ALREADY_COMPLETE, RESUMED, require_libraries
from blueprints.backends.state import COMPLETE, JobStatus, seconds_between
from blueprints.cli.live import View, describe, duration, elapsed, open_view
from blueprints.cli.outcome import print_failure, print_results
from blueprints.errors import EnvironmentFault, ExitCode, JobFailedError, UsageError
from blueprints.jobset import build_objects
from blueprints.manifests import require_valid
from blueprints.recipe import LoadedRecipe, load_recipe
from blueprints.resolve import ResolvedJob, Step, resolve
from blueprints.runtimes import Manifest, shared_claim_note
from blueprints.trainjob import default_name, runtime_for, runtime_name, to_yaml, train_job

POLL_SECONDS = 0.2


def train(args: argparse.Namespace) -> int:
    """`blueprints train`: run a recipe as a job and follow it."""
    loaded = _load(args)
    backend = _backend(args)
    runtime = backend.runtime(runtime_name(loaded.recipe))
    name = default_name(loaded, runtime, unique=True) if args.name is None else args.name
    job = train_job(loaded, runtime, name=name)
    require_valid(job, runtime)
    for note in backend.notes(job, runtime):
        print(f"note: {note}", file=sys.stderr)
    if args.dry_run:
        return _dry_run(backend, job, runtime, as_json=args.json)
    stream = sys.stderr if args.json else sys.stdout
    with _Signals() as signals:
        outcome = backend.start(job, runtime, resume=_resume_command(args, name))
        if args.detach and outcome != ALREADY_COMPLETE:
            return _detached(backend, name, as_json=args.json)
        _say_started(stream, outcome, backend, name)
        if outcome == ALREADY_COMPLETE:
            status = backend.get(name)
        else:
            status = _follow(backend, name, open_view(stream), signals)
    if signals.detach:
        print(f"the job goes on: `blueprints logs {name} --follow{_option(backend)}`", file=sys.stderr)
        return int(ExitCode.INTERRUPTED if signals.interrupts else ExitCode.TERMINATED)
    _show_end(status, backend, as_json=args.json)
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
    backend = _backend(args)
    found = backend.jobs()
    if args.json:
        far = backend.name != "local"  # the progress of each would be a call or two
        _print_json([_as_json(status, backend, progress=not far) for status in found])
        return 0
    if not found:
        print(f"no jobs in {backend.place}", file=sys.stderr)
        return 0
    rows = [("NAME", "STATE", "RUNTIME", "AGE", "TIME", "WHAT")]
    for status in found:
        age, ran = seconds_between(status.created, None), seconds_between(status.started, status.ended)
        time_so_far = "" if ran is None else duration(ran)
        rows.append((status.name, status.state, status.runtime, duration(age or 0), time_so_far, _what(status)))
    _print_table(rows)
    return 0


def get(args: argparse.Namespace) -> int:
    """`blueprints get`: one job."""
    backend = _backend(args)
    status = backend.get(args.name)
    if args.json:
        _print_json(_as_json(status, backend))
        return 0
    ran = seconds_between(status.started, status.ended)
    directory = backend.files(args.name)
    print(f"{status.name}: {status.state}{f' ({status.reason})' if status.reason and status.state != COMPLETE else ''}")
    if status.message and not status.finished:
        print(f"  {status.message}")
        if status.todo:
            print(f"    -> {status.todo}")
    print(f"  runtime    {status.runtime}, {status.num_nodes} node{'' if status.num_nodes == 1 else 's'}")
    print(f"  created    {status.created}{f', ran {duration(ran)}' if ran is not None else ''}")
    print(f"  directory  {directory.path}" if directory is not None else f"  cluster    {backend.place}")
    reports = backend.progress(status)
    for step in status.steps:
        code = "" if step.exit_code is None else f", exit code {step.exit_code}"
        attempts = f", attempt {step.attempts}" if step.attempts > 1 else ""
        devices = f", {step.device_count} {step.device}" if step.device_count else ""
        report = reports.get(step.name) if step.status == "Running" else None
        doing = f", {report['phase']} {describe(report)}".rstrip() if report else ""
        print(f"  {step.name:<20} {step.status:<10} {elapsed(step):>8}{devices}{code}{attempts}{doing}")
    for note in status.notes:
        print(f"  note: {note}")
    _show_end(status, backend, as_json=False)
    return 0


def logs(args: argparse.Namespace) -> int:
    """`blueprints logs`: what the steps printed."""
    lines = _backend(args).logs(args.name, [args.step] if args.step else [], follow=args.follow)
    for step, line in lines:
        print(line if args.step else f"[{step}] {line}", flush=args.follow)
    return 0


def events(args: argparse.Namespace) -> int:
    """`blueprints events`: what happened to a job and its parts."""
    found = _backend(args).events(args.name)
    if args.json:
        _print_json([{**dataclasses.asdict(event), "event_time": event.event_time.isoformat()} for event in found])
        return 0
    if not found:
        print(f"there are no events of {args.name}: a cluster keeps them for an hour", file=sys.stderr)
        return 0
    rows = [("TIME", "TYPE", "REASON", "OBJECT", "MESSAGE")]
    for event in found:
        about = f"{event.involved_object_kind}/{event.involved_object_name}"
        when = event.event_time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        rows.append((when, event.type, event.reason, about, event.message))
    _print_table(rows)
    return 0


def wait(args: argparse.Namespace) -> int:
    """`blueprints wait`: the job's outcome as exit code."""
    backend = _backend(args)
    try:
        status = backend.wait(args.name, timeout=args.timeout)
    except TimeoutError as error:
        todo = f"`blueprints get {args.name}{_option(backend)}` shows where it is"
        raise JobFailedError(str(error), todo=todo) from None
    _show_end(status, backend, as_json=args.json, brief=True)
    return int(status.exit_code or 0)


def suspend(args: argparse.Namespace) -> int:
    """`blueprints suspend`: stop a job so that it can go on later."""
    backend = _backend(args)
    backend.suspend(args.name)
    print(f"{args.name} is suspended, saving its state: `blueprints resume {args.name}{_option(backend)}`")
    return 0


def resume(args: argparse.Namespace) -> int:
    """`blueprints resume`: let a suspended job go on."""
    backend = _backend(args)
    backend.resume(args.name)
    print(f"{args.name} goes on: `blueprints logs {args.name} --follow{_option(backend)}`")
    return 0


def delete(args: argparse.Namespace) -> int:
    """`blueprints delete`: remove jobs; on this machine with all their files."""
    backend = _backend(args)
    for name in args.names:
        backend.get(name)  # before the first one is gone, see that all of them exist
    for name in dict.fromkeys(args.names):
        backend.delete(name, force=args.force, claims=args.claims)
        print(f"deleted {name}")
    return 0


def _backend(args: argparse.Namespace) -> Backend:
    return open_backend(args.backend, kubeconfig=args.kubeconfig, context=args.context, namespace=args.namespace)


def _option(backend: Backend) -> str:
    """What has to be added to a command for the same backend."""
    return "" if backend.name == "local" else f" --backend {backend.name}"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip())


# -- starting


def _load(args: argparse.Namespace) -> LoadedRecipe:
    return load_recipe(args.recipe, overlays=args.files, overrides=args.overrides)


def _resume_command(args: argparse.Namespace, name: str) -> str:
    files = [word for file in args.files for word in ("-f", str(file))]
    command = shlex.join(["blueprints", "train", args.recipe, *files, *args.overrides, "--name", name])
    layer = os.environ.get("LORA_CONFIG", "").strip()
    return f"LORA_CONFIG={shlex.quote(layer)} {command}" if layer else command


def _say_started(stream: TextIO, outcome: str, backend: Backend, name: str) -> None:
    directory = backend.files(name)
    if outcome == ALREADY_COMPLETE:
        print(f"job {name} is complete already: same name, same recipe", file=stream)
        return
    went_on = "goes on where it stopped" if outcome == RESUMED else "started"
    where = f"its files: {directory.path}" if directory is not None else f"in {backend.place}"
    print(f"job {name} {went_on}; {where}", file=stream, flush=True)
    if directory is None:
        print("Ctrl-C lets go of it, and it goes on in the cluster", file=stream, flush=True)


def _detached(backend: Backend, name: str, *, as_json: bool) -> int:
    if as_json:
        _print_json(_as_json(backend.get(name), backend))
        return 0
    option = _option(backend)
    print(name)
    print(f"  follow it   blueprints logs {name} --follow{option}")
    print(f"  its state   blueprints get {name}{option}")
    print(f"  wait for it blueprints wait {name}{option}")
    print(f"  stop it     blueprints delete {name} --force{option}")
    return 0


def _dry_run(backend: Backend, job: Manifest, runtime: Manifest, *, as_json: bool) -> int:
    backend.check(job, runtime)
    if backend.name != "local":
        if as_json:
            _print_json({"name": job["metadata"]["name"], "trainJob": job, "accepted": True})
        else:
            sys.stdout.write(to_yaml(job))
            print(f"# the API server takes it (dry run): {backend.place}")
        return 0
    return _dry_run_here(job, resolve(job, runtime), as_json=as_json)


def _dry_run_here(job: Manifest, resolved: ResolvedJob, *, as_json: bool) -> int:
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


def _follow(backend: Backend, name: str, view: View, signals: _Signals) -> JobStatus:
    """Show the job until it has ended or the client is told to let go.

    Ctrl-C is handed on to a job of this machine; one in a cluster is let go of.
    """
    handled = 0
    told: list[str] = []

    def say_once(text: str) -> None:
        if text not in told:
            view.say(text)
            told.append(text)

    watch = backend.watch(name)
    with contextlib.closing(watch), _closing(view):
        while True:
            status = watch.status()
            for note in status.notes:
                say_once(f"note: {note}")
            if status.message and status.reason and not status.finished:
                todo = f"\n  -> {status.todo}" if status.todo else ""
                say_once(f"{status.state}: {status.message}{todo}")
            view.update(status, backend.progress(status))
            if status.finished or signals.detach:
                return status
            if signals.interrupts > handled:
                handled = signals.interrupts
                if backend.name != "local":
                    signals.detach = True
                    return status
                view.say("stopping gracefully (Ctrl-C again to kill)" if handled == 1 else "killing the job")
                backend.stop(name, kill=handled > 1)
            watch.wait(POLL_SECONDS)


# -- the end


def _show_end(status: JobStatus, backend: Backend, *, as_json: bool, brief: bool = False) -> None:
    if as_json:
        _print_json(_as_json(status, backend))
    elif status.state == COMPLETE:
        if brief:
            print(f"{status.name}: {status.state}; output: {backend.result_place(status.name)}")
        else:
            print_results(status, backend.result_place(status.name), backend.run(status.name))
    elif status.finished:
        directory = backend.files(status.name)
        step = next((step for step in status.steps if step.name == status.failed_step), None)
        log = None
        if step is not None:
            shown = f"`blueprints logs {status.name} --step {step.name}{_option(backend)}`"
            log = shown if directory is None else str(directory.log(step.name))
        print_failure(status, log)


def _what(status: JobStatus) -> str:
    if status.state == COMPLETE:
        return ""
    if status.finished:
        return f"{status.reason}: {status.message}"
    running = [step.name for step in status.steps if step.status == "Running"]
    return status.message or ", ".join(running)


def _as_json(status: JobStatus, backend: Backend, *, progress: bool = True) -> dict[str, Any]:
    run, directory = backend.run(status.name), backend.files(status.name)
    seconds = seconds_between(status.started, status.ended)
    report = directory.output / "report.html" if directory is not None else None
    return {
        **status.as_dict(),
        "status": status.state,
        "seconds": None if seconds is None else round(seconds, 1),
        "backend": backend.name,
        "place": backend.place,
        "directory": None if directory is None else str(directory.path),
        "workspace": None if directory is None else str(directory.workspace),
        "output": str(directory.output) if directory is not None and directory.output.is_dir() else None,
        "report": str(report) if report is not None and report.is_file() else None,
        "artifacts": dict(run.artifacts) if run else {},
        "metrics": dict(run.metrics) if run else {},
        "proofs": dict(run.proofs) if run else {},
        "progress": backend.progress(status) if progress else {},
    }


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
