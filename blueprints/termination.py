"""How a step of a job ends: one exit code, and the cause where Kubernetes and the local backend look for it.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from blueprints.errors import BlueprintError, EnvironmentFault, ExitCode

VARIABLE = "BLUEPRINTS_TERMINATION_LOG"
KUBERNETES_LOG = "/dev/termination-log"
LIMIT = 4096
"""Bytes Kubernetes keeps of a termination message."""


def write_termination(error: BlueprintError | dict[str, Any]) -> None:
    """Write the cause of a failure as JSON (at most 4 KiB) into the termination log; the first cause stays.

    The file is the environment's `BLUEPRINTS_TERMINATION_LOG`, else `/dev/termination-log` where that exists and is
    writable; without either, nothing is written.
    """
    path = _path()
    if path is None:
        return
    data = dict(error) if isinstance(error, dict) else error.as_dict()
    try:
        if path.exists() and path.stat().st_size:
            return  # of several failing ranks the first one knows the cause
        path.write_bytes(_fit(data))
    except OSError as fault:
        _print(f"could not write the termination message to {path}: {fault}")


def read_termination(path: Path) -> dict[str, Any] | None:
    """The cause in `path` as written by `write_termination`; None if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    if not text:
        return None
    try:
        data = json.loads(text)
    except ValueError:
        return {"problem": text[-LIMIT:]}
    return data if isinstance(data, dict) else {"problem": text[-LIMIT:]}


def run_main(func: Callable[[], int | None], *, handle_sigterm: bool = True) -> NoReturn:
    """Run `func` as the whole of a step's process and exit with the project's exit code.

    A `BlueprintError` is printed on stderr, written as termination message and exits with its code. A full disk exits
    5. Anything else is our bug: the traceback goes to the log, exit 1.

    Args:
        func: the step; returns its exit code, None for 0.
        handle_sigterm: turn SIGTERM into `SystemExit(143)` raised in the main thread, so that `finally` blocks run.
    """
    if handle_sigterm and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    sys.exit(_guarded(func))


def _guarded(func: Callable[[], int | None]) -> int:
    try:
        return int(func() or 0)
    except BlueprintError as error:
        return _report(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _report(_disk_full(error))
        return _bug(error)
    except Exception as error:  # noqa: BLE001 - the outermost edge of the process: everything ends as an exit code
        return _bug(error)


def _report(error: BlueprintError) -> int:
    write_termination(error)
    _print(f"error: {error}")
    return int(error.exit_code)


def _disk_full(error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"no space left on the device: {error}",
        where=str(error.filename or ""),
        todo="free some disk space and run the same command again",
    )


def _bug(error: Exception) -> int:
    problem = f"unexpected {type(error).__name__}: {error}"
    write_termination(BlueprintError(problem, todo="this is a bug of llm-blueprints: see the log for the traceback"))
    _print("".join(traceback.format_exception(error)) + f"error: {problem}")
    _print("  -> this is a bug of llm-blueprints: please report it with the lines above")
    return int(ExitCode.BUG)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # a log on a full disk must not change the exit code
        print(text, file=sys.stderr, flush=True)


def _terminated(_signum: int, _frame: object) -> NoReturn:
    raise SystemExit(int(ExitCode.TERMINATED))


def _path() -> Path | None:
    name = os.environ.get(VARIABLE)
    if name:
        return Path(name)
    kubernetes = Path(KUBERNETES_LOG)
    return kubernetes if kubernetes.is_file() and os.access(kubernetes, os.W_OK) else None


def _fit(data: dict[str, Any]) -> bytes:
    """`data` as JSON of at most `LIMIT` bytes: faults are dropped from the end, then the problem is cut."""
    data = dict(data)
    faults = list(data.get("faults") or [])
    while True:
        text = json.dumps(data, ensure_ascii=False).encode()
        if len(text) <= LIMIT:
            return text
        if faults:
            faults.pop()
            data["faults"], data["faults_left_out"] = list(faults), True
            continue
        longest = max((key for key, value in data.items() if isinstance(value, str)), key=lambda key: len(data[key]))
        data[longest] = data[longest][: max(0, len(data[longest]) - (len(text) - LIMIT) - 8)] + "…"
