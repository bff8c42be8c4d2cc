"""A running job as seen from the command line: a live view at a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

from blueprints.backends.state import JobStatus, StepStatus, seconds_between
from blueprints.progress import ProgressState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDE = 130
"""Columns from which the live view has room for a bar."""
PLAIN_SECONDS = 5.0
"""Longest silence of the plain view while something moves."""
PLAIN_SHARE = 0.1
"""Share of a phase after which the plain view says so."""
MARKS = {"Pending": "·", "Running": "▸", "Succeeded": "✓", "Failed": "✗"}
STYLES = {"Pending": "dim", "Running": "cyan", "Succeeded": "green", "Failed": "red"}


class View(Protocol):
    """Shows a job while it runs."""

    def update(self, status: JobStatus, progress: Mapping[str, ProgressState]) -> None:
        """Show where the job is."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """The job has ended."""


def open_view(stream: TextIO) -> View:
    """The live view if `stream` is a terminal that can move its cursor, else plain lines."""
    if stream.isatty():
        from rich.console import Console

        console = Console(file=stream, highlight=False)
        if not console.is_dumb_terminal:
            return LiveView(console)
    return PlainView(stream)


def describe(report: ProgressState, *, short: bool = False) -> str:
    """A report in a few words: amount, loss, pace, time left; `short` for narrow places."""
    parts = [amount(report, unit=not short)]
    metrics = report["metrics"]
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:,.0f} {'tok/s' if short else 'tokens/s'}")
    if report["eta_seconds"] is not None and report["eta_seconds"] >= 0.5:
        parts.append(f"ETA {clock(report['eta_seconds'])}")
    parts.append(report["message"])
    return (" " if short else ", ").join(filter(None, parts))


def amount(report: ProgressState, *, unit: bool = True) -> str:
    """How much of the phase is done, such as `120/300 steps`."""
    done, total = report["completed"], report["total"]
    if not total and not done:
        return ""
    if report["unit"] == "bytes":
        return f"{done / 1e6:.1f}/{total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
    name = report["unit"] if unit else ""
    return f"{done:,.0f}/{total:,.0f} {name}".strip() if total else f"{done:,.0f} {name}".strip()


def duration(seconds: float) -> str:
    """Seconds for a person: `8 s`, `1 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def clock(seconds: float) -> str:
    """Seconds in little room: `8 s`, `1:20`, `2:05:00`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def elapsed(step: StepStatus) -> str:
    """How long the step has run."""
    seconds = seconds_between(step.started, step.ended)
    return "" if seconds is None else clock(seconds) if seconds >= 10 else f"{seconds:.1f} s"


def _exit(step: StepStatus) -> str:
    """How the step ended, where that is known."""
    return "" if step.exit_code is None else f" with exit code {step.exit_code}"


class PlainView:
    """One line per change, for logs and pipes.

    Args:
        stream: where to print.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._seen: dict[str, tuple[str, int]] = {}
        self._phase: dict[str, str] = {}
        self._shown: dict[str, tuple[float, float]] = {}
        """By step: when progress was last printed (monotonic seconds), and how much was done then."""

    def update(self, status: JobStatus, progress: Mapping[str, ProgressState]) -> None:
        for step in status.steps:
            current = (step.status, step.attempts)
            before = self._seen.get(step.name, ("Pending", 0))
            if step.name in progress and step.status != "Pending":
                self._report(step.name, progress[step.name], starting=before[0] != "Running" or before == current)
            if current != before:
                self._changed(step, before)
                self._seen[step.name] = current

    def _changed(self, step: StepStatus, before: tuple[str, int]) -> None:
        if step.attempts > before[1]:
            attempt = f" (attempt {step.attempts})" if step.attempts > 1 else ""
            self.say(f"{step.name}: started{attempt}")
            self._phase.pop(step.name, None)
        if step.status == "Succeeded":
            self.say(f"{step.name}: finished{f' in {elapsed(step)}' if step.started else ''}")
        elif step.status == "Failed":
            self.say(f"{step.name}: failed{_exit(step)}{f' after {elapsed(step)}' if step.started else ''}")
        elif step.status == "Pending" and step.attempts:
            self.say(f"{step.name}: ended{_exit(step)}; will be started again")

    def _report(self, name: str, report: ProgressState, *, starting: bool) -> None:
        phase, done, now = report["phase"], report["completed"], time.monotonic()
        if phase == "done" or not starting:
            return
        if self._phase.get(name) != phase:
            self._phase[name] = phase
        else:
            when, amount_then = self._shown[name]
            moved = done - amount_then
            share = moved / report["total"] if report["total"] else 0.0
            far = share >= PLAIN_SHARE and now - when >= 0.5
            if not (far or (moved and now - when >= PLAIN_SECONDS)):
                return
        self._shown[name] = (now, done)
        details = describe(report)
        self.say(f"{name}: {phase}{f': {details}' if details else ''}")

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """A table that moves: state, phase, bar, loss, pace and time left of every step.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self.console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def update(self, status: JobStatus, progress: Mapping[str, ProgressState]) -> None:
        self._live.update(self._render(status, progress), refresh=True)

    def _render(self, status: JobStatus, progress: Mapping[str, ProgressState]) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        wide = self.console.width >= WIDE
        table = Table.grid(padding=(0, 2 if wide else 1))
        for width in (21, 9, *((20,) if wide else ()), 6):
            table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for step in status.steps:
            report = progress.get(step.name) if step.status == "Running" else None
            style = STYLES[step.status]
            attempt = f"attempt {step.attempts}  " if step.attempts > 1 else ""
            table.add_row(
                Text(f"{MARKS[step.status]} {step.name}", style),
                Text(report["phase"] if report else step.status.lower(), style),
                *((self._bar(report),) if wide else ()),
                Text(elapsed(step), "dim"),
                Text(attempt + (describe(report, short=not wide) if report else "")),
            )
        time_so_far = seconds_between(status.started or status.created, status.ended) or 0.0
        title = Text.assemble((status.name, "bold"), f"  {status.state.lower()}  ", (duration(time_so_far), "dim"))
        return Group(title, table)

    def _bar(self, report: ProgressState | None) -> RenderableType:
        from rich.progress_bar import ProgressBar

        if report is None or not report["total"]:
            return ""
        return ProgressBar(total=report["total"], completed=report["completed"], width=20)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def close(self) -> None:
        self._live.stop()
