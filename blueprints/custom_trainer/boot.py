"""Runs in a node's container, whatever its image: installs packages, writes the function's file, starts torchrun on it.

Standard library alone, Python 3.8 or newer: the image need not have llm-blueprints. This text is an argument of the
TrainJob; it also becomes the module `blueprints_function`, from which the function's file imports `run_function`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

DONE, USER_INPUT, FAILED, ENVIRONMENT, TERMINATED = 0, 2, 4, 5, 143
CODES = "BLUEPRINTS_FUNCTION_CODES"
"""Variable with the directory where the function's processes leave their exit codes."""
NO_NETWORK = ("connection", "timed out", "name resolution", "temporary failure", "read-only", "no space left")


def main(argv: list[str]) -> int:
    """Install, write, start, wait.

    Args:
        argv: this text, the function's file, then the options.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("boot")
    parser.add_argument("script")
    parser.add_argument("--file", default="function.py")
    parser.add_argument("--launcher", choices=("torchrun", "python"), default="torchrun")
    parser.add_argument("--package", action="append", default=[])
    parser.add_argument("--index-url", action="append", default=[])
    options = parser.parse_args(argv)
    directory = own_directory()
    (directory / "blueprints_function.py").write_text(options.boot, encoding="utf-8")
    (directory / options.file).write_text(options.script, encoding="utf-8")
    python = install(directory, options.package, options.index_url) if options.package else sys.executable
    if python is None:
        return exit_code_of(directory)
    command = [python, str(directory / options.file)]
    if options.launcher == "torchrun":
        found = subprocess.run(
            [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))"], check=False
        )
        if found.returncode:
            todo = "use an image with torch (on this machine: pip install torch), or name it in packages_to_install"
            tell(ENVIRONMENT, "torchrun cannot be started: this Python has no torch", python, todo)
            return ENVIRONMENT
        command = [python, "-m", "torch.distributed.run", *command[1:]]
    return supervise(command, directory)


def own_directory() -> Path:
    """A fresh directory of this process: in the workspace, where it is there and can be written."""
    for place in (os.environ.get("BLUEPRINTS_WORKSPACE"), str(Path.cwd()), tempfile.gettempdir()):
        if place and os.access(place, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=".function-", dir=place))
    return Path(tempfile.mkdtemp(prefix=".function-"))


def install(directory: Path, packages: list[str], urls: list[str]) -> str | None:
    """Install packages into an environment of this job, which sees what is installed already and changes nothing of it.

    Returns:
        its interpreter; None if it failed, which has been told.
    """
    print(f"installing {', '.join(packages)}", flush=True)
    place = directory / "venv"
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place)], capture_output=True, text=True, check=False
    )
    python = str(place / "bin" / "python")
    if made.returncode == 0:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        # What pip finds here it does not install again, and what lies outside of the environment it does not remove.
        parents = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        lines = [f"import site; site.addsitedir({path!r})" for path in [*parents, site.getusersitepackages()]]
        (place / "lib" / version / "site-packages" / "beneath.pth").write_text(
            "\n".join(lines) + "\n", encoding="utf-8"
        )
        pip = [
            "--disable-pip-version-check",
            "--no-input",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-warn-script-location",
        ]
        where = ["--index-url", urls[0]] if urls else []
        for url in urls[1:]:
            where += ["--extra-index-url", url]
        environment = {**os.environ, "PIP_USER": "0"}
        command = [sys.executable, "-m", "pip", *pip, *where, *packages]
        made = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    if made.returncode == 0:
        return python
    said = ((made.stdout or "") + (made.stderr or "")).strip()
    print(said, flush=True)
    lines = [line for line in said.splitlines() if line.strip().upper().startswith("ERROR")] or said.splitlines()[-1:]
    away = any(word in said.lower() for word in NO_NETWORK) or "No module named" in said
    cause = lines[0].replace("ERROR: ", "") if lines else f"exit code {made.returncode}"
    todo = "see that the index can be reached and the disk written" if away else "correct packages_to_install"
    tell(
        ENVIRONMENT if away else USER_INPUT,
        f"the packages could not be installed: {cause}",
        ", ".join(packages),
        todo,
    )
    leave_code(directory, ENVIRONMENT if away else USER_INPUT, cause)
    return None


def supervise(command: list[str], directory: Path) -> int:
    """Run the launcher, hand SIGTERM on to it, and end as the function did."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(directory), environment.get("PYTHONPATH")]))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment[CODES] = str(directory)
    stopped: list[int] = []
    # Started with the signal held back, so that none is lost between the start and the handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    process = subprocess.Popen(
        command,
        env=environment,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),  # noqa: PLW1509 - one thread
    )

    def stop(number: int, _frame: Any) -> None:
        stopped.append(number)
        process.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = process.wait()
    if stopped:  # an eviction must not look like success, whatever the function made of it
        return TERMINATED
    if code == 0:
        return DONE
    own = exit_code_of(directory)  # torchrun itself would always end with 1
    if own != DONE:
        print(f"error: {first_failure(directory)[1]}", file=sys.stderr, flush=True)  # below torchrun's own report
        return own
    code = code if code > 0 else 128 - code
    killed = "a process was killed by a signal: most often the machine ran out of memory"
    todo = "see the log above; ask for more memory or use a smaller batch"
    tell(code, killed if code != 1 else f"it ended without saying why; perhaps {killed}", Path(command[-1]).name, todo)
    return code


def exit_code_of(directory: Path) -> int:
    """The code of the process that failed first; 0 if none said so."""
    return first_failure(directory)[0]


def first_failure(directory: Path) -> tuple[int, str]:
    """Code and cause of the process that failed first."""
    files = sorted(directory.glob("exit-code-*[0-9]"), key=lambda path: path.stat().st_mtime_ns)
    code, _, problem = files[0].read_text(encoding="utf-8").partition(" ") if files else (str(DONE), "", "")
    return int(code), problem


def leave_code(directory: Path, code: int, problem: str) -> None:
    """Tell the supervising process how this one ends."""
    path = directory / f"exit-code-{os.getpid()}"
    path.with_suffix(".new").write_text(f"{code} {problem}", encoding="utf-8")
    path.with_suffix(".new").rename(path)


def tell(code: int, problem: str, where: str, todo: str) -> None:
    """The cause, on standard error and as termination message; of several processes the first one is heard."""
    print(f"error: {where}: {problem}\n  -> {todo}", file=sys.stderr, flush=True)
    names = {USER_INPUT: "USER_INPUT", 3: "INVALID_DATA", FAILED: "JOB_FAILED", ENVIRONMENT: "ENVIRONMENT"}
    path = Path(os.environ.get("BLUEPRINTS_TERMINATION_LOG") or "/dev/termination-log")
    said = {
        "code": names.get(code, "JOB_FAILED"),
        "exit_code": code,
        "problem": problem[:2000],
        "where": where,
        "todo": todo,
    }
    try:
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps(said), encoding="utf-8")
    except OSError:
        return  # not in a container: standard error has it


def run_function(function: Callable[..., object], arguments: dict[str, Any]) -> NoReturn:
    """Call the function in one of the node's processes and end the process as the call ended."""
    code, said, directory = DONE, "", Path(os.environ[CODES])
    try:
        function(**arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else DONE if ended.code is None else FAILED
        if code:
            said = str(ended.code) if isinstance(ended.code, str) else f"the function ended with exit code {code}"
            tell(code, said, function.__name__, "see its log")
    except BaseException as error:  # noqa: BLE001 - the edge of the process: all becomes an exit code
        code, said = FAILED, f"{type(error).__name__}: {error}"
        traceback.print_exception(type(error), error, _frames(error))
        tell(code, said, _place(error, function.__name__), "see the traceback in its log")
    if code:
        leave_code(directory, code, said)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # collectives of a failed peer can hang in the interpreter's shutdown
    sys.exit(DONE)


def _frames(error: BaseException) -> Any:
    """The traceback from the function on."""
    return error.__traceback__.tb_next if error.__traceback__ is not None else None


def _place(error: BaseException, name: str) -> str:
    """The line of the function at which it failed."""
    frames = traceback.extract_tb(_frames(error))
    own = [frame for frame in frames if Path(frame.filename).name.startswith("function_")]
    return f"line {own[-1].lineno} of {own[-1].name}(): {own[-1].line}" if own else f"{name}()"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
