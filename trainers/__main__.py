"""`torchrun -m trainers --recipe NAME|FILE [-f OVERLAY]... [key=value]...`: train what the recipe says.

The methods are this table and nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from blueprints.errors import ExitCode, UsageError
from trainers import process
from trainers.functions import load_function
from trainers.quiet import quiet

if TYPE_CHECKING:
    from blueprints.recipe.schema import Recipe
    from trainers.run import Run

METHODS = {
    "sft": "trainers.sft:train",
    "grpo": "trainers.grpo:train",
    "distill": "trainers.distill:train",
    "dpo": "trainers.dpo:train",
    "ppo": "trainers.ppo:train",
    "qat": "trainers.qat:train",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line: the recipe and what overrides it."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m trainers",
        description="Train what a recipe says, on the prepared rows and the model in $BLUEPRINTS_WORKSPACE.",
    )
    parser.add_argument("--recipe", required=True, metavar="NAME|FILE", help="a shipped recipe's name or a YAML file")
    parser.add_argument("-f", "--file", action="append", default=[], metavar="FILE", help="overlay file, repeatable")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, such as lora.r=4")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str]) -> int:
    """Resolve the recipe and hand it to its method's trainer.

    Raises:
        UsageError: the recipe's method has no trainer in this release, or is a function that cannot be found.
        RecipeError: the recipe is wrong.
    """
    arguments = parse(argv)
    from blueprints.recipe import load_recipe

    loaded = load_recipe(arguments.recipe, overlays=arguments.file, overrides=arguments.overrides, environ=os.environ)
    if not loaded.recipe.resources.gpu:
        process.hide_gpus()
    quiet(main=process.world().main)  # before the libraries are imported
    method = find_method(loaded.recipe)
    here = process.world()
    if here.local_rank == 0 and not here.main:
        print(f"rank {here.rank} of {here.size}: rank 0, on the first node, prints for all", flush=True)
    from trainers.run import execute

    return execute(method, loaded, tuple(arguments.overrides))


def find_method(recipe: Recipe) -> Callable[[Run], None]:
    """The function that trains by the recipe's method: of the table, or the user's own `package.module:function`.

    Raises:
        UsageError: the module cannot be found or has no such function.
    """
    name = METHODS.get(recipe.method, recipe.method)
    if ":" not in name:
        raise UsageError(
            f"this release has no trainer for method {name!r}", where="method", todo=f"use one of: {', '.join(METHODS)}"
        )
    found: Callable[[Run], None] = load_function(name, where="method")
    return found


def run(step: Callable[[Sequence[str]], int] = main) -> int:
    """The whole life of a training process: its exit code, with every failure explained.

    Args:
        step: what to do with the arguments.

    Returns:
        the exit code: 0 done, 2 and 3 the user's input and data, 4 training failed, 5 the environment, 143 stopped
        after saving, 1 a fault of ours.
    """
    from trainers import diagnose

    code = int(ExitCode.BUG)
    try:
        process.adopt_mpi()
        process.register()
        code = step(sys.argv[1:])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ExitCode.USER_INPUT)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the edge of the process: all becomes an exit code
        code = diagnose.report(error)
    finally:
        process.leave_exit_code(code)
    return code


def leave(exit_code: int) -> NoReturn:
    """End the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Collectives of a failed peer can hang in the interpreter's shutdown: leave without it when something went wrong.
    if exit_code:
        os._exit(exit_code)
    sys.exit(0)


if __name__ == "__main__":
    leave(run())
