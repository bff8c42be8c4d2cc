"""Errors as a product: what happened, where, what to do, and one exit code each.

Every error a user can meet derives from `BlueprintError`. Its text is complete by itself: the command line prints it
and nothing else. The exit codes are the same for the command line and for the containers of a job, where the runtime's
`podFailurePolicy` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What a process of this project says with its exit status."""

    DONE = 0
    """Success."""
    BUG = 1
    """A fault of llm-blueprints: please report it."""
    USER_INPUT = 2
    """The recipe, an override or an argument is wrong: running it again cannot help."""
    INVALID_DATA = 3
    """The data set or the model does not fit the recipe: running it again cannot help."""
    JOB_FAILED = 4
    """The job ran and failed: its log and termination message say why."""
    ENVIRONMENT = 5
    """Something around the job is missing: an extra, disk space, a port, the network."""
    INTERRUPTED = 130
    """Ctrl-C at the terminal."""
    TERMINATED = 143
    """SIGTERM: state was saved and the same command goes on from there."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a recipe, a manifest or a row of data.

    Attributes:
        where: the place, as `file:line`, `override 'lora.r=x'` or `environment LORA_CONFIG`.
        key: the dotted key or field path, empty where there is none.
        problem: what is wrong, with the value that was found.
        expected: what would have been right, empty if `problem` says it all.
        hint: what to do; the nearest valid key where one is near.
    """

    where: str
    key: str
    problem: str
    expected: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.key}: {self.problem}" if self.key else f"{self.where}: {self.problem}"
        if self.expected:
            text += f"; expected {self.expected}"
        return f"{text}. {self.hint}" if self.hint else text

    def as_dict(self) -> dict[str, Any]:
        """The fault as plain JSON data."""
        return asdict(self)


class BlueprintError(Exception):
    """Base of every error with a message for the user.

    Args:
        problem: what happened, in one line.
        where: file, line, key, step or address it happened at.
        todo: the next action for the reader.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, problem: str, *, where: str = "", todo: str = "") -> None:
        super().__init__(problem)
        self.problem, self.where, self.todo = problem, where, todo

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}\n  -> {self.todo}" if self.todo else text

    def as_dict(self) -> dict[str, Any]:
        """The error as plain JSON data, for `--json` and for termination messages."""
        return {
            "code": self.exit_code.name,
            "exit_code": int(self.exit_code),
            "problem": self.problem,
            "where": self.where,
            "todo": self.todo,
        }


class UsageError(BlueprintError):
    """The user's input cannot work: exit code 2."""

    exit_code = ExitCode.USER_INPUT


class DataError(BlueprintError):
    """The data set or the model is invalid for this recipe: exit code 3."""

    exit_code = ExitCode.INVALID_DATA


class JobFailedError(BlueprintError):
    """A job or one of its steps failed while running: exit code 4."""

    exit_code = ExitCode.JOB_FAILED


class EnvironmentFault(BlueprintError):
    """The surroundings lack something (extra, disk, port, network): exit code 5."""

    exit_code = ExitCode.ENVIRONMENT


class FaultList(UsageError):
    """Several faults at once, in the order of the file."""

    def __init__(self, faults: Sequence[Fault], *, subject: str) -> None:
        self.faults = tuple(faults)
        count = f"{len(self.faults)} fault" + ("" if len(self.faults) == 1 else "s")
        super().__init__(f"{subject}: {count}", todo="")

    def __str__(self) -> str:
        return "\n".join([self.problem, *(f"  {fault}" for fault in self.faults)])

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"faults": [fault.as_dict() for fault in self.faults]}


class RecipeError(FaultList):
    """Everything wrong with a recipe: exit code 2."""


class ManifestError(FaultList):
    """Everything wrong with a TrainJob or a runtime: exit code 2."""


class RowsError(FaultList):
    """Everything wrong with the rows of a data set, up to a limit: exit code 3."""

    exit_code = ExitCode.INVALID_DATA
