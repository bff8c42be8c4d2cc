"""Sources: what a URI may look like, and what to write instead of one that cannot work."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from blueprints.recipe.schema import BUILTIN_DATASETS, BUILTIN_MODELS, SCHEMES

LATER = ("s3", "gs", "az", "https", "http", "oci", "cache")
"""Schemes a later version reads."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_HUB = re.compile(rf"{_PART}/{_PART}(@[^@\s]+)?")
_HUB_NAME = re.compile(rf"{_PART}/{_PART}")
_DATA_ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".gz", ".zst", ".bz2", ".xz", ".txt", ".safetensors")


@dataclass(frozen=True)
class UriFault:
    """What is wrong with a URI, what was expected, and what to write instead."""

    problem: str
    expected: str
    hint: str = ""


def revision_in(uri: str) -> str | None:
    """The revision a `hf://org/name@revision` names, None if it names none."""
    name, at, revision = uri.partition("@")
    return revision if name.startswith("hf://") and at else None


def uri_fault(uri: str, *, dataset: bool) -> UriFault | None:
    """What is wrong with `uri`; None if nothing is.

    Args:
        uri: the text of the recipe.
        dataset: the URI names rows; otherwise a model.
    """
    match = _SCHEME.fullmatch(uri)
    if match is None:
        return _no_scheme(uri, dataset=dataset)
    scheme, rest = match.groups()
    if any(ord(character) < 32 for character in rest):
        return UriFault(f"found {uri!r}, with a control character", _expected(dataset=dataset))
    if scheme != scheme.lower():
        return UriFault(f"found the scheme `{scheme}://`", _expected(dataset=dataset), f"Write `{scheme.lower()}://`.")
    if scheme == "builtin":
        return _builtin(rest, dataset=dataset)
    if scheme == "file":
        return _file(rest)
    if scheme == "hf":
        return _hub(rest)
    return _unsupported(scheme, uri)


def _expected(*, dataset: bool) -> str:
    builtin = (BUILTIN_DATASETS if dataset else BUILTIN_MODELS)[0]
    return f"a URI: hf://org/name, file:///path or builtin://{builtin}"


def _no_scheme(uri: str, *, dataset: bool) -> UriFault:
    problem = f"found {uri!r}, which is not a URI"
    builtin = BUILTIN_DATASETS if dataset else BUILTIN_MODELS
    lead = re.match(r"(hf|file|builtin):/?(?!/)", uri)
    if uri in builtin:
        hint = f"Write `builtin://{uri}`."
    elif lead is not None:
        rest = uri[lead.end() :]
        hint = f"Write `file://{Path('/', rest)}`." if lead[1] == "file" else f"Write `{lead[1]}://{rest}`."
    elif _looks_like_path(uri):
        hint = f"Write `file://{_absolute(uri)}`."
    elif _HUB_NAME.fullmatch(uri):
        hint = f"Write `hf://{uri}`."
    else:
        hint = f"Write `file://{_absolute(uri)}` for a file, `hf://org/name` for the Hub."
    return UriFault(problem, _expected(dataset=dataset), hint)


def _looks_like_path(text: str) -> bool:
    if text.startswith((".", "/", "~")) or text.endswith(_DATA_ENDINGS) or re.match(r"[A-Za-z]:[\\/]", text):
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _absolute(text: str) -> str:
    if re.match(r"[A-Za-z]:[\\/]", text):
        return "/" + text.replace("\\", "/")
    try:
        # Not resolve(): a link is what the user named.
        path = Path(text).expanduser()
    except RuntimeError:  # ~someone who does not exist
        path = Path(text)
    parts: list[str] = []
    for part in path.absolute().parts[1:]:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return "/" + "/".join(parts)


def _builtin(name: str, *, dataset: bool) -> UriFault | None:
    known, others = (BUILTIN_DATASETS, BUILTIN_MODELS) if dataset else (BUILTIN_MODELS, BUILTIN_DATASETS)
    if name in known:
        return None
    kind = "data set" if dataset else "model"
    if name in others:
        hint = f"`builtin://{name}` is a {'model' if dataset else 'data set'}."
    else:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        hint = f"Did you mean `builtin://{near[0]}`?" if near else ""
    return UriFault(
        f"found 'builtin://{name}', and no embedded {kind} is called so",
        f"builtin://{', builtin://'.join(known)}",
        hint,
    )


def _file(rest: str) -> UriFault | None:
    expected = "file:// and an absolute path: file:///path"
    if not rest.startswith("/"):
        text = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
        hint = f"Write `file://{_absolute(text)}`." if text else ""
        return UriFault(f"found 'file://{rest}', whose path is not absolute", expected, hint)
    if not rest.strip("/"):
        return UriFault(f"found 'file://{rest}', which names no file", expected)
    return None


def _hub(rest: str) -> UriFault | None:
    if _HUB.fullmatch(rest):
        return None
    expected = "hf://org/name or hf://org/name@revision"
    name = rest.strip("/")
    name = name.removeprefix("datasets/").removeprefix("models/") if name.count("/") > 1 else name
    parts = name.split("/")
    if len(parts) > 4 and parts[2] == "tree":
        hint = f"Write `hf://{parts[0]}/{parts[1]}@{'/'.join(parts[3:])}`."
    elif _HUB.fullmatch("/".join(parts[:2])):
        hint = f"Write `hf://{'/'.join(parts[:2])}`."
    else:
        hint = "The organisation or user comes first, as on the model's page." if len(parts) == 1 and name else ""
    return UriFault(f"found 'hf://{rest}'", expected, hint)


def _unsupported(scheme: str, uri: str) -> UriFault:
    supported = "one of the supported schemes: " + ", ".join(f"{name}://" for name in SCHEMES)
    hint = ""
    try:
        address = urlsplit(uri)
    except ValueError:  # brackets that make no address
        address = urlsplit("")
    if address.netloc in ("huggingface.co", "hf.co", "www.huggingface.co"):
        parts = address.path.strip("/").split("/")
        parts = parts[1:] if parts[0] in ("datasets", "models") else parts
        if len(parts) >= 2:
            hint = f"Write `hf://{parts[0]}/{parts[1]}`."
    else:
        near = difflib.get_close_matches(scheme, SCHEMES, 1, 0.5) if scheme not in LATER else []
        if near:
            hint = f"Did you mean `{near[0]}://`?"
        elif scheme in LATER:
            hint = "Copy the source to a local path and name it as file:///path."
    return UriFault(f"`{scheme}://` is not supported in this version, found {uri!r}", supported, hint)
