"""`hf://org/name[@revision]`: a model or a data set of the Hugging Face Hub, or of a server with its protocol."""

from __future__ import annotations

import glob
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blueprints.errors import BlueprintError, DataError, EnvironmentFault, UsageError
from initializers.settings import Request
from initializers.sources.types import Resolved, hidden, ignored, made_by_steps
from initializers.workspace import MANIFEST, FileEntry, entry

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

PUBLIC = "https://huggingface.co"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER_WEIGHTS = ("*.gguf", "*.onnx", "*.onnx_data", "onnx/*", "*.msgpack", "*.h5", "*.ot", "*.tflite", "*.mlmodel",
                  "*.mlpackage/*", "coreml/*", "openvino/*", "original/*")  # fmt: skip
"""Weights for other frameworks; Transformers reads none of them by default."""
_SPECIAL_REVISION = re.compile(r"^(refs/(?:pr/\d+|convert/[\w.-]+))(?:/(.*))?$")
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class HubName:
    """A parsed `hf://` URI: repository, revision (None: the default branch) and folder within (empty: all)."""

    repo: str
    revision: str | None
    folder: str


def parse(request: Request) -> HubName:
    """The parts of a `hf://` URI.

    Raises:
        UsageError: it names no repository, or two different revisions are asked for.
    """
    rest = request.uri.partition("://")[2].strip("/")
    before, at, after = rest.partition("@")
    segments = before.split("/")
    folder = "/".join(segments[2:])
    revision: str | None = None
    if at:
        special = _SPECIAL_REVISION.match(after)
        revision, _, tail = after.partition("/")
        if special:
            revision, tail = special[1], special[2] or ""
        elif request.kind == "model":
            revision, tail = after, ""  # branches may have slashes; a model has no folder
        folder = "/".join(part for part in (folder, tail) if part)
    repo = "/".join(segments[:2])
    form = "hf://org/name, hf://org/name@revision" + (", hf://org/name/folder" if request.kind == "dataset" else "")
    if len(segments) < 2 or not all(segments[:2]) or (at and not revision) or (folder and request.kind == "model"):
        raise UsageError(f"{request.uri!r} names no repository", where="STORAGE_URI", todo=f"write {form}")
    if revision and request.revision and revision != request.revision:
        raise UsageError(
            f"two revisions are asked for: {revision!r} in the URI and {request.revision!r} beside it",
            where="STORAGE_URI",
            todo="keep one of them",
        )
    return HubName(repo, revision or request.revision, folder)


class HubSource:
    """Repositories of the Hub, by huggingface_hub."""

    def inputs(self, request: Request) -> Mapping[str, object]:
        """The endpoint; the revision asked for is part of every request. No network: a branch may have moved on."""
        parse(request)
        return {"endpoint": request.endpoint or PUBLIC}

    def local_files(self, request: Request) -> dict[str, Path] | None:
        """None: the files must be fetched."""
        parse(request)
        return None

    def fetch(self, request: Request, destination: Path, on_bytes: Callable[[int, int | None], None]) -> Resolved:
        """Download the repository at one commit.

        Raises:
            UsageError: the repository or the revision does not exist, or this token may not read it.
            DataError: it holds nothing usable (a model with pickles alone), or a file arrived damaged.
            EnvironmentFault: the network or the server fails.
        """
        name = parse(request)
        errors = _Translate(request, name)
        with errors:
            commit, listed = _list(request, name)
        chosen = _choose_model(listed, request) if request.kind == "model" else _choose_rows(listed, request, name)
        total = sum(file.size for file in chosen)
        _require_space(destination, total)
        with errors:
            _download(request, name, commit, [file.path for file in chosen], destination, total, on_bytes)
        shutil.rmtree(destination / ".cache", ignore_errors=True)  # the hub's own notes
        entries = tuple(_verified(destination, file) for file in chosen)
        skipped = len(listed) - len(chosen)
        note = f"{name.repo} at commit {commit}" + (f"; {skipped} other files not fetched" if skipped else "")
        return Resolved(revision=commit, files=entries, notes=(note,))


def _list(request: Request, name: HubName) -> tuple[str, list[RepoFile]]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(endpoint=request.endpoint, token=request.token)
    info = api.repo_info(name.repo, revision=name.revision or "main", repo_type=request.kind)
    if info.sha is None:
        raise EnvironmentFault("the server does not say which commit this is", where=request.endpoint or PUBLIC)
    tree = api.list_repo_tree(name.repo, recursive=True, revision=info.sha, repo_type=request.kind)
    return info.sha, [item for item in tree if isinstance(item, RepoFile)]


def _choose_rows(listed: Sequence[RepoFile], request: Request, name: HubName) -> list[RepoFile]:
    folder = f"{name.folder}/" if name.folder else ""
    chosen = [
        file
        for file in listed
        if file.path.startswith(folder) and not hidden(file.path) and not ignored(file.path, request.ignore_patterns)
    ]
    own = made_by_steps([file.path for file in chosen], request.kind)
    chosen = [file for file in chosen if file.path not in own]
    if not chosen:
        what = f"the folder {name.folder}" if folder else "the repository"
        raise DataError(
            f"{what} of {name.repo} has no files" + (" that are not ignored" if listed else ""),
            where="STORAGE_URI",
            todo=f"look at {request.endpoint or PUBLIC}/datasets/{name.repo}/tree/{name.revision or 'main'}",
        )
    return chosen


def _choose_model(listed: Sequence[RepoFile], request: Request) -> list[RepoFile]:
    """Configuration, tokenizer, chat templates and safetensors; pickles only where nothing ignores them."""
    skip = [*request.ignore_patterns, *_OTHER_WEIGHTS]
    names = [file.path for file in listed]
    if "model.safetensors" in names or "model.safetensors.index.json" in names:
        skip += ["consolidated*.safetensors", "consolidated*.safetensors.index.json"]  # the same weights once more
    chosen = [
        file
        for file in listed
        if not hidden(file.path)
        and not ignored(file.path, [*skip, MANIFEST])
        and (request.trust_remote_code or not file.path.endswith(".py"))
    ]
    safe = [file for file in chosen if file.path.endswith(".safetensors")]
    if safe:
        return [file for file in chosen if not file.path.endswith(PICKLES)]
    pickles = [file.path for file in listed if file.path.endswith(PICKLES)]
    if pickles and not any(file.path.endswith(PICKLES) for file in chosen):
        raise DataError(
            f"the model has its weights as pickles alone ({', '.join(pickles[:3])}), which can run code when loaded",
            where=request.uri,
            todo="use a model with safetensors, or, if you trust it, fetch pickles too with model.ignore_patterns=[]",
        )
    return chosen


def _require_space(destination: Path, total: int) -> None:
    free = shutil.disk_usage(destination).free
    if total > free:
        raise EnvironmentFault(
            f"the files need {total:,} bytes, the disk has {free:,} free",
            where=str(destination.parent),
            todo="give the workspace a larger volume or free some space",
        )


def _download(
    request: Request,
    name: HubName,
    commit: str,
    files: Sequence[str],
    destination: Path,
    total: int,
    on_bytes: Callable[[int, int | None], None],
) -> None:
    """Run huggingface_hub's download beside this thread, which reports progress and stays open to SIGTERM."""
    from huggingface_hub import snapshot_download

    outcome: list[BaseException] = []

    def work() -> None:
        try:
            snapshot_download(
                name.repo,
                repo_type=request.kind,
                revision=commit,
                allow_patterns=[glob.escape(file) for file in files],
                local_dir=destination,
                cache_dir=destination / ".cache",
                token=request.token,
                endpoint=request.endpoint,
            )
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread as it is
            outcome.append(error)

    worker = threading.Thread(target=work, daemon=True, name="download")
    worker.start()
    while worker.is_alive():
        worker.join(_POLL_SECONDS)
        on_bytes(min(total, _size(destination)), total)
    if outcome:
        raise outcome[0]


def _size(root: Path) -> int:
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # a part file that was renamed meanwhile
    return total


def _verified(destination: Path, file: RepoFile) -> FileEntry:
    path = destination / file.path
    try:
        found = entry(destination, path)
    except FileNotFoundError:
        raise EnvironmentFault("the file was not downloaded", where=file.path, todo="run the step again") from None
    lfs: Any = file.lfs
    wanted = None if lfs is None else str(lfs.sha256)
    if found.size != file.size or (wanted and found.sha256 != wanted):
        raise EnvironmentFault(
            f"the file arrived damaged: {found.size} of {file.size} bytes, sha256 {found.sha256[:12]}…"
            + (f" instead of {wanted[:12]}…" if wanted else ""),
            where=file.path,
            todo="run the step again; if it stays, the mirror (HF_ENDPOINT) serves another file",
        )
    return found


class _Translate:
    """Turns huggingface_hub's exceptions, by type, into what happened and what to do."""

    def __init__(self, request: Request, name: HubName) -> None:
        self.request, self.name = request, name
        self.where = _without_user(request.endpoint or PUBLIC)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, BlueprintError) or not isinstance(error, Exception):
            return
        translated = self._translated(error)
        if translated is not None:
            raise translated from None

    def _translated(self, error: Exception) -> BlueprintError | None:
        import httpx2
        from huggingface_hub import errors as hub

        if isinstance(error, hub.LocalEntryNotFoundError | hub.IncompleteSnapshotError) and error.__cause__ is not None:
            error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if isinstance(error, hub.OfflineModeIsEnabled):
            return EnvironmentFault("HF_HUB_OFFLINE is set", where=self.where, todo="unset it, or use file:///")
        if isinstance(error, hub.HFValidationError):
            return UsageError(
                f"{self.name.repo!r} is no repository name", where="STORAGE_URI", todo="write hf://org/name"
            )
        if isinstance(error, hub.HfHubHTTPError):
            return self._refused(error, hub)
        if isinstance(error, httpx2.TimeoutException):
            return self._network("does not answer in time")
        if isinstance(error, httpx2.ProxyError):
            return self._network("cannot be reached through the proxy")
        if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
            return UsageError(f"not an address: {self.where!r}", where="HF_ENDPOINT", todo="write https://host")
        if isinstance(error, httpx2.TransportError | hub.LocalEntryNotFoundError | hub.FileMetadataError):
            return self._network(f"cannot be reached: {_line(error)}")
        if isinstance(error, ValueError):
            return EnvironmentFault(
                f"the answer is not the Hub's: {_line(error)}", where=self.where, todo="check HF_ENDPOINT"
            )
        return None

    def _network(self, problem: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self.where} {problem}",
            where=self.request.uri,
            todo="check the network and HTTPS_PROXY, or set HF_ENDPOINT to a mirror; then run the step again",
        )

    def _refused(self, error: Any, hub: Any) -> BlueprintError:
        page = f"{self.where}/{'datasets/' if self.request.kind == 'dataset' else ''}{self.name.repo}"
        has_token = self.request.token is not None
        status = error.response.status_code
        what = "data set" if self.request.kind == "dataset" else "model"
        by = "this token" if has_token else "an anonymous request"
        token = (
            "with a token of an account that may" if has_token else "and set HF_TOKEN (or ACCESS_TOKEN) to your token"
        )
        if isinstance(error, hub.GatedRepoError):
            return UsageError(
                f"the {what} {self.name.repo} is gated and {by} may not read it",
                where=self.request.uri,
                todo=f"accept its terms at {page} {token}",
            )
        if isinstance(error, hub.DisabledRepoError):
            return UsageError(f"the {what} {self.name.repo} is disabled by the Hub", where=self.request.uri)
        if isinstance(error, hub.RepositoryNotFoundError) or (status == 401 and not has_token):
            return UsageError(
                f"there is no {what} {self.name.repo}, or it is private and "
                + ("this token may not read it" if has_token else "no token is set"),
                where=self.request.uri,
                todo=f"check the name at {page}; for a private one set HF_TOKEN to a token that may read it",
            )
        if isinstance(error, hub.RevisionNotFoundError):
            return UsageError(
                f"{self.name.repo} has no revision {self.name.revision!r}",
                where=self.request.uri,
                todo=f"see its branches, tags and commits at {page}",
            )
        if status in (401, 403):
            return UsageError(
                f"the server refuses {'the token' if has_token else 'access without a token'} (HTTP {status})",
                where=self.request.uri,
                todo="set HF_TOKEN (or ACCESS_TOKEN) to a valid token with read access",
            )
        if isinstance(error, hub.EntryNotFoundError) or status == 404:
            return EnvironmentFault(f"HTTP 404: {_line(error)}", where=self.request.uri, todo="run the step again")
        return EnvironmentFault(
            f"{self.where} answers HTTP {status}" + (" (too many requests)" if status == 429 else ""),
            where=self.request.uri,
            todo="wait a little and run the step again" + ("" if has_token else "; a token raises the rate limit"),
        )


def _without_user(address: str) -> str:
    """The address without `user:password@`, which is nobody's business in a log."""
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
