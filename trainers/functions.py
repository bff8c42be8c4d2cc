"""Functions that a recipe names as `package.module:function`: methods, rewards and metrics of the user's own."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blueprints.errors import UsageError
from blueprints.progress import CALLED_FROM


def load_function(name: str, *, where: str) -> Callable[..., Any]:
    """The function `package.module:function`, imported.

    Modules are looked for where Python looks: installed packages, PYTHONPATH and the working directory; last of all, so
    that it hides no library, in the directory that a job of this machine was started from.

    Args:
        name: the function.
        where: key of the recipe, for the error.

    Raises:
        UsageError: there is no such module, it cannot be imported, or it has no such function.
    """
    called_from = os.environ.get(CALLED_FROM)
    if called_from and called_from not in sys.path:
        sys.path.append(called_from)
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UsageError(
                f"there is no module {missing!r}",
                where=f"{where} ({name})",
                todo="install its package, or put its directory on PYTHONPATH (looked in: "
                f"{', '.join(dict.fromkeys([path or str(Path.cwd()) for path in sys.path[:3]] + sys.path[-1:]))}, ...)",
            ) from None
        raise UsageError(
            f"importing {module_name} failed: no module {missing!r}", where=f"{where} ({name})", todo="install it"
        ) from error
    except (ImportError, SyntaxError, NameError, TypeError, ValueError, AttributeError, KeyError, OSError) as error:
        raise UsageError(
            f"importing {module_name} failed: {type(error).__name__}: {error}",
            where=f"{where} ({name})",
            todo="correct the module",
        ) from error
    members = vars(module)
    found = members.get(function_name)
    if not callable(found):
        near = difflib.get_close_matches(function_name, [key for key, value in members.items() if callable(value)], 1)
        raise UsageError(
            f"the module {module_name} has no function {function_name!r}",
            where=f"{where} ({name})",
            todo=f"did you mean {near[0]!r}?" if near else "name one of its functions",
        )
    function: Callable[..., Any] = found
    return function
