"""`python -m initializers dataset|model|validate`: the initializer container's command."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence

STEPS = {
    "dataset": "fetch the rows into $BLUEPRINTS_WORKSPACE/dataset and prepare them for the recipe",
    "model": "fetch the model into $BLUEPRINTS_WORKSPACE/model and check its files",
    "validate": "check every row for the recipe and leave nothing behind",
}


def parser() -> argparse.ArgumentParser:
    """The command line: one word; everything else comes from the environment."""
    from initializers import settings

    table = (settings.__doc__ or "").partition("\n\n")[2]
    arguments = argparse.ArgumentParser(
        prog="python -m initializers",
        description="Bring a model or a data set into the workspace, complete and verified.\n\nsteps:\n"
        + "\n".join(f"  {name:10}{text}" for name, text in STEPS.items())
        + "\n\nenvironment:\n"
        + _plain(table),
        epilog="exit codes: 0 done, 2 wrong settings, 3 invalid data, 5 network or disk, 143 terminated.\n\n"
        "example:\n  STORAGE_URI=file:///data/rows.jsonl BLUEPRINTS_RECIPE=sft-lora BLUEPRINTS_WORKSPACE=/tmp/work \\\n"
        "    python -m initializers validate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("step", choices=STEPS, metavar="dataset|model|validate", help="what to do")
    return arguments


def _plain(table: str) -> str:
    """The settings' table without its markup."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return "\n".join(f"  {name.replace('`', ''):24}{text.replace('`', '')}" for name, text in rows)


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one step.

    Args:
        argv: the arguments. Default: the process's.
        environ: the environment that configures it. Default: the process's.

    Raises:
        BlueprintError: whatever went wrong, with its exit code.
    """
    step = parser().parse_args(argv).step
    from blueprints.errors import EnvironmentFault

    try:
        return _run(step, environ)
    except OSError as error:
        if error.errno is None or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # a full disk has its own message
        raise EnvironmentFault(
            f"the operating system refuses: {error.strerror}",
            where=str(error.filename or ""),
            todo="check that the path exists and that this user may read the source and write the workspace",
        ) from error


def _run(step: str, environ: Mapping[str, str] | None) -> int:
    from blueprints.progress import Progress
    from initializers.settings import read_settings

    progress = Progress()
    if step == "model":
        from initializers.model import run_model

        return run_model(read_settings("model", environ), progress)
    from initializers.dataset import run_dataset, run_validate

    if step == "validate":
        return run_validate(read_settings("dataset", environ, uri_from_recipe=True), progress)
    return run_dataset(read_settings("dataset", environ), progress)


def _quiet_libraries() -> None:
    """Keep libraries' banners out of the log and torch out of the process: tokenizers need none of it."""
    # Where torch is installed, transformers would import it, which takes longer than most steps.
    sys.modules["torch"] = None  # type: ignore[assignment]  # documented: makes `import torch` fail
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def run(func: Callable[[], int]) -> None:
    """Run a step as the whole of this process."""
    from blueprints.errors import ExitCode
    from blueprints.termination import run_main

    _quiet_libraries()
    try:
        run_main(func)
    except SystemExit as stop:
        if stop.code == ExitCode.TERMINATED:
            # Threads of a download would hold up a normal exit until the grace period is over.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ExitCode.TERMINATED)
        raise


if __name__ == "__main__":
    run(main)
