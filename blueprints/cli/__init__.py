"""The command line: `blueprints VERB ...`. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from blueprints import __version__
from blueprints.cli.arguments import VERBS, nearest_verb, parse, top_parser
from blueprints.errors import BlueprintError, EnvironmentFault, ExitCode, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name. Default: this process's.

    Returns:
        the exit code; errors have been printed on standard error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character still shows the rest
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except BlueprintError as error:
        return _report(error, as_json="--json" in words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except OSError as error:
        return _report(_surroundings(error), as_json="--json" in words) if _is_disk(error) else _bug(error)
    except Exception as error:  # noqa: BLE001 - the outermost edge: everything ends as an exit code and one line
        return _bug(error)
    return code


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0].startswith("-"):
        return _without_verb(words)
    verb = VERBS.get(words[0])
    if verb is None:
        raise UsageError(f"unknown verb {words[0]!r}", where="blueprints", todo=nearest_verb(words[0]))
    try:
        args = parse(verb, words[1:])
    except SystemExit as stop:  # argparse leaves this way after --help
        return int(stop.code or 0)
    module, _, function = verb.target.partition(":")
    run: Callable[[Any], int] = vars(importlib.import_module(module))[function]
    return run(args)


def _without_verb(words: list[str]) -> int:
    parser = top_parser()
    try:
        args, rest = parser.parse_known_args(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    if args.version:
        print(f"blueprints {__version__}")
        return ExitCode.DONE
    options = [word for word in rest if word.startswith("-")]
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    parser.print_help(sys.stderr)
    return ExitCode.USER_INPUT


def _report(error: BlueprintError, *, as_json: bool) -> int:
    text = json.dumps(error.as_dict(), ensure_ascii=False) if as_json else f"error: {error}"
    print(text, file=sys.stderr)
    return int(error.exit_code)


def _is_disk(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _surroundings(error: OSError) -> BlueprintError:
    return EnvironmentFault(
        error.strerror or str(error), where=str(error.filename or ""), todo="free some space, or write elsewhere"
    )


def _bug(error: BaseException) -> int:
    """One line for the user, and the traceback in a file they can attach to a report."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="blueprints-", suffix=".traceback", delete=False, encoding="utf-8", errors="backslashreplace"
    ) as file:
        traceback.print_exception(error, file=file)
    problem = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"error: this is a bug of llm-blueprints ({problem}); please report it with {file.name}", file=sys.stderr)
    return ExitCode.BUG
