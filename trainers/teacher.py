"""`python -m trainers.teacher`: the teacher scores the prepared rows, for a distillation with `distill.teacher_top_k`.

A step between the initializers and training; what it leaves is told in `trainers.scoring`. It reads the recipe as the
initializers do (`BLUEPRINTS_RECIPE`, `BLUEPRINTS_OVERRIDES`) or as training does (`--recipe NAME [key=value]...`). Killed,
it goes on with the next shard when it is run again; done, it does nothing. Under torchrun the processes share the rows.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blueprints.errors import UsageError
from trainers import process
from trainers.process import say
from trainers.quiet import quiet

if TYPE_CHECKING:
    from blueprints.recipe.schema import Recipe


def main(argv: Sequence[str]) -> int:
    """Store the teacher's scores, if the recipe asks for them.

    Raises:
        UsageError: no recipe is named.
        RecipeError: the recipe is wrong.
        DataError: rows or teacher are not there, or do not belong together.
    """
    from blueprints.progress import Progress

    recipe, progress = named_recipe(argv, os.environ), Progress()
    if recipe.distill is None or recipe.distill.teacher_top_k is None:
        say("nothing to do: the recipe has no distill.teacher_top_k, so no scores are stored")
        progress.update("done", message="nothing to do")
        return 0
    quiet(main=process.world().main)  # before the libraries are imported
    from trainers.scoring import store

    store(process.workspace(), recipe, progress)
    return 0


def named_recipe(argv: Sequence[str], environ: Mapping[str, str]) -> Recipe:
    """The resolved recipe that the command line names, else the environment.

    Raises:
        UsageError: neither does, or the overrides in the environment are not a JSON list.
        RecipeError: the recipe is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trainers.teacher", description="Score the prepared rows with the recipe's teacher."
    )
    parser.add_argument("--recipe", metavar="NAME|FILE", help="default: the environment's BLUEPRINTS_RECIPE")
    parser.add_argument("-f", "--file", action="append", default=[], metavar="FILE", help="overlay file, repeatable")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, such as distill.teacher_top_k=64")
    arguments = parser.parse_intermixed_args(argv)
    from blueprints.recipe import load_recipe

    if arguments.recipe:
        return load_recipe(
            arguments.recipe, overlays=arguments.file, overrides=arguments.overrides, environ=environ
        ).recipe
    name = environ.get("BLUEPRINTS_RECIPE", "").strip()
    if not name:
        raise UsageError("no recipe is named", where="environment", todo="give --recipe NAME, or set BLUEPRINTS_RECIPE")
    text = environ.get("BLUEPRINTS_OVERRIDES", "").strip() or "[]"
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", where="environment BLUEPRINTS_OVERRIDES") from None
    # The client folded its environment (LORA_CONFIG) into the overrides already.
    return load_recipe(name, overrides=[*overrides, *arguments.overrides], environ={}).recipe


if __name__ == "__main__":
    from trainers.__main__ import leave, run

    leave(run(main))
