"""A function as the text of a Python file that calls it."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from blueprints.errors import UsageError

WHERE = "CustomTrainer(func=...)"
ARGUMENTS = "CustomTrainer(func_args=...)"
ENTRY = """

if __name__ == "__main__":
    from blueprints_function import run_function

    run_function({name}, {arguments})
"""
_PROVIDED = {"__name__", "__file__", "__doc__", "__builtins__"}
_SHOWN = 60


def script_of(func: Callable[..., object], arguments: Mapping[str, Any] | None) -> str:
    """A Python file that holds the function and calls it with the arguments.

    Raises:
        UsageError: it is no self-contained function with readable source, or the arguments do not fit or are not plain.
    """
    source = source_of(func)
    given = dict(arguments or {})
    try:
        inspect.signature(func).bind(**given)
    except TypeError as error:
        todo = f"it takes {inspect.signature(func)}"
        raise UsageError(f"{func.__name__}() cannot be called with them: {error}", where=ARGUMENTS, todo=todo) from None
    call = ENTRY.format(name=func.__name__, arguments=literal(given, ARGUMENTS))
    # Annotations are not evaluated: they may speak of what is not imported there.
    return f"from __future__ import annotations\n\n\n{source.rstrip()}\n{call}"


def source_of(func: Callable[..., object]) -> str:
    """The source of a self-contained function.

    Raises:
        UsageError: there is none, or it needs what is not in it.
    """
    _check_kind(func)
    name = func.__name__
    try:
        text = inspect.getsource(func)
    except (OSError, TypeError):
        todo = "define it in a file or a notebook cell: what was typed into the interpreter or made by exec() has none"
        raise UsageError(f"the source of {name}() cannot be found", where=WHERE, todo=todo) from None
    text, node = _parsed(text, name)
    if node.decorator_list:
        decorator = ast.unparse(node.decorator_list[0])
        problem = f"{name}() is decorated with @{decorator}, which is not part of it"
        raise UsageError(problem, where=WHERE, todo="call what the decorator does inside the function")
    missing = sorted({*_outer_names(func.__code__), *_in_defaults(node)} - {name})
    if missing:
        problem = f"{name}() uses {', '.join(missing)} from outside: only its own source travels"
        raise UsageError(problem, where=WHERE, todo="import and define it inside the function, or pass it by func_args")
    return text


def _check_kind(func: Callable[..., object]) -> None:
    """See that it is a plain function."""
    problem, todo = "", "give a function made by def"
    if isinstance(func, functools.partial):
        problem, todo = (
            "a partial function has no source of its own",
            "give its function, and its arguments as func_args",
        )
    elif inspect.ismethod(func):
        problem, todo = f"{func.__qualname__} is a method: its object does not travel", "give a function instead"
    elif inspect.isclass(func) or not callable(func):
        problem = f"{_short(func)} is not a function"
    elif inspect.isbuiltin(func) or not inspect.isfunction(func):
        problem = f"{_short(func)} is not written in Python as a function"
    elif func.__name__ == "<lambda>":
        problem = "a lambda has no source that could be sent alone"
    elif func.__code__.co_freevars:
        names = ", ".join(func.__code__.co_freevars)
        problem, todo = f"{func.__name__}() uses {names} of the function around it", "pass them by func_args"
    elif inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        problem, todo = f"calling {func.__name__}() would not run it", "give a function without async and yield"
    elif "<locals>" not in func.__qualname__ and "." in func.__qualname__:
        problem, todo = f"{func.__qualname__} is defined in a class", "define it outside of the class"
    if problem:
        raise UsageError(problem, where=WHERE, todo=todo)


def _parsed(text: str, name: str) -> tuple[str, ast.FunctionDef]:
    """Source that can stand at the beginning of a line, and its tree.

    Raises:
        UsageError: the file was changed since the function was imported from it.
    """
    candidates = [text]
    if text[:1].isspace():
        # Taking indentation away would change strings of several lines: then it is kept below an `if`.
        candidates = [f"if True:\n{text}", textwrap.dedent(text)]
    trees = []
    for candidate in candidates:
        try:
            tree = ast.parse(candidate)
        except SyntaxError:
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.If) else tree.body
        if len(body) == 1 and isinstance(body[0], ast.FunctionDef) and body[0].name == name:
            trees.append((candidate, body[0]))
    if not trees:
        todo = "import it again: its file was changed after it had been imported"
        raise UsageError(f"what stands at the place of {name}() is not its definition", where=WHERE, todo=todo)
    if len({ast.dump(node) for _, node in trees}) == 1:
        return trees[-1]
    return trees[0]


def _outer_names(code: CodeType) -> Iterator[str]:
    """Global names that a function reads and does not make itself."""
    codes, made, read = [code], set[str](), set[str]()
    while codes:
        current = codes.pop()
        codes += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(current):
            if step.opname == "STORE_GLOBAL":
                made.add(str(step.argval))
            elif step.opname == "STORE_NAME":
                made.add(str(step.argval))  # of a class inside
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(str(step.argval))
    yield from (name for name in read - made - _PROVIDED if not hasattr(builtins, name))


def _in_defaults(node: ast.FunctionDef) -> Iterator[str]:
    """Names in default values, which are evaluated where the function is defined."""
    for default in [*node.args.defaults, *node.args.kw_defaults]:
        for inner in ast.walk(default) if default is not None else ():
            if isinstance(inner, ast.Name) and not hasattr(builtins, inner.id):
                yield inner.id


def literal(value: Any, where: str) -> str:
    """Plain data as Python source.

    Raises:
        UsageError: something in it is not plain; `where` leads there.
    """
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if type(value) is dict:
        items = (f"{literal(key, where)}: {literal(item, f'{where}[{key!r}]')}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if type(value) in (list, tuple, set, frozenset):
        inner = ", ".join(literal(item, f"{where}[{place}]") for place, item in enumerate(value))
        if type(value) is list:
            return f"[{inner}]"
        if type(value) is tuple:
            return f"({inner},)" if value else "()"
        return f"{type(value).__name__}([{inner}])"
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    todo = (
        "give numbers, strings, None, and lists, tuples, sets and dictionaries of these, such as str(path) or float(x)"
    )
    raise UsageError(f"{_short(value)} ({kind}) is not plain data", where=where, todo=todo)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
