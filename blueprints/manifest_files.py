"""TrainJobs and runtimes in YAML files that people wrote: read, checked, and every fault with its file and line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from blueprints.errors import Fault, ManifestError, UsageError
from blueprints.manifests import RUNTIME_KINDS, check_runtime, check_train_job
from blueprints.runtimes import Manifest, shipped_runtimes
from blueprints.structure import misfits

_PART = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")


@dataclass(frozen=True)
class Document:
    """One object of a YAML file.

    Attributes:
        data: the object.
        file: as it was named.
        node: the same with its places.
    """

    data: Manifest
    file: str
    node: yaml.Node

    @property
    def kind(self) -> str:
        return str(self.data.get("kind"))

    @property
    def name(self) -> str:
        return str((self.data.get("metadata") or {}).get("name"))

    def where(self, key: str) -> str:
        """File and line of a dotted key, or of the nearest part of it that is there."""
        return f"{self.file}:{_line(self.node, key)}"


def is_manifest(path: Path) -> bool:
    """Whether a YAML file holds Kubernetes objects rather than a recipe; False if it cannot be read."""
    try:
        first = next(yaml.safe_load_all(path.read_text(encoding="utf-8")), None)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(first, dict) and "kind" in first and "apiVersion" in first


def read_documents(source: str) -> list[Document]:
    """The objects of a YAML file; `-` reads standard input. Lists (`kind: List`) are taken apart.

    Raises:
        UsageError: the file cannot be read, is no YAML, or holds something else than objects.
    """
    file = "standard input" if source == "-" else source
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        pairs = list(_composed(text))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=file, todo="name a YAML file") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f"{file}:{mark.line + 1}" if mark else file
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise UsageError(f"is not YAML: {problem}", where=place, todo="correct it") from None
    found: list[Document] = []
    for item, node in pairs:
        if item is None:
            continue
        if not isinstance(item, dict) or "kind" not in item:
            place = f"{file}:{node.start_mark.line + 1}"
            raise UsageError("is not a Kubernetes object", where=place, todo="give it apiVersion, kind and metadata")
        if item["kind"] == "List":
            found += [Document(entry, file, node) for entry in item.get("items") or []]
        else:
            found.append(Document(item, file, node))
    return found


def check_documents(documents: Sequence[Document]) -> list[Fault]:
    """Every fault of the TrainJobs and runtimes among `documents`, with file and line.

    A TrainJob is held against its runtime if that is among the documents or ships with this version; other kinds of
    objects are not looked at.

    Raises:
        EnvironmentFault: the `kubernetes` package, which knows the fields of Pods, is not installed.
    """
    known = shipped_runtimes() | {item.name: item.data for item in documents if item.kind in RUNTIME_KINDS}
    faults: list[Fault] = []
    for item in documents:
        if item.kind == "TrainJob" or item.kind in RUNTIME_KINDS:
            faults += [dataclasses.replace(fault, where=item.where(fault.key)) for fault in _faults_of(item, known)]
    return faults


def _faults_of(item: Document, known: Mapping[str, Manifest]) -> list[Fault]:
    """Structure first; the rules too, unless they would stumble over values of another type."""
    title, is_job = f"{item.kind} {item.name}", item.kind == "TrainJob"
    found = list(misfits(item.data, "TrainJob" if is_job else "Runtime", title))
    faults = {misfit.fault.key: misfit.fault for misfit in found}
    if any(misfit.mistyped for misfit in found):
        return list(faults.values())
    runtime = known.get(str(item.data["spec"]["runtimeRef"]["name"])) if is_job else None
    rules = check_train_job(item.data, runtime) if is_job else check_runtime(item.data)
    return [*faults.values(), *(fault for fault in rules if fault.key not in faults)]


def require_valid_files(sources: Sequence[str]) -> list[Document]:
    """The objects of YAML files, all TrainJobs and runtimes among them valid.

    Raises:
        ManifestError: with every fault.
        UsageError: a file cannot be read, or none holds a TrainJob or a runtime.
    """
    documents = [document for source in sources for document in read_documents(source)]
    if not any(document.kind in ("TrainJob", *RUNTIME_KINDS) for document in documents):
        kinds = ", ".join(sorted({document.kind for document in documents})) or "nothing"
        problem = f"there is nothing to check: found {kinds}"
        raise UsageError(problem, where=", ".join(sources), todo="name a file with a TrainJob or a runtime")
    faults = check_documents(documents)
    if faults:
        raise ManifestError(faults, subject=", ".join(sources))
    return documents


def _composed(text: str) -> Iterator[tuple[Any, yaml.Node]]:
    """Every document of a YAML text as data and as nodes."""
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            yield loader.construct_document(node), node
    finally:
        loader.dispose()


def _line(node: yaml.Node, key: str) -> int:
    line: int = node.start_mark.line + 1
    for match in _PART.finditer(key):
        below = _step(node, match[1] if match[1] is not None else match[2])
        if below is None:
            break
        line, node = below
    return line


def _step(node: yaml.Node, part: str) -> tuple[int, yaml.Node] | None:
    """The line of a map's key or of a list's item (by index or by its name), and what is there."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            if part == str(place) or _scalar(item, "name") == part:
                return item.start_mark.line + 1, item
    return None


def _scalar(node: yaml.Node, key: str) -> Any:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if name.value == key and isinstance(value, yaml.ScalarNode):
            return value.value
    return None
