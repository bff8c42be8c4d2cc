"""A small server that speaks the part of the Hugging Face Hub's HTTP protocol that downloads need.

Repositories are directories. It answers the API of revisions and trees, HEAD and GET of files with ETag, ranges and
the Hub's error codes, on 127.0.0.1 in a thread. It can gate a repository behind a token and fail on purpose.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".bin", ".parquet", ".gz", ".arrow")
_API = re.compile(r"^/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)/?(.*))?$")
_FILE = re.compile(r"^/(datasets/)?(.+?)/resolve/([^/]+)/(.+)$")


@dataclass
class Repo:
    """One repository: its files, its revisions, and how it misbehaves.

    Attributes:
        root: directory with the files of `main`.
        kind: `models` or `datasets`.
        commits: directory of every other revision by name.
        token: needed to read it; None: public.
        gated: a request without the token is told that the terms must be accepted.
        status: answer every request with this HTTP status.
        damage: names of files whose content arrives changed.
    """

    root: Path
    kind: str = "models"
    commits: dict[str, Path] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False
    status: int | None = None
    damage: frozenset[str] = frozenset()

    def resolve(self, revision: str) -> tuple[str, Path] | None:
        """Commit and directory of a branch, tag or commit."""
        known = {"main": self.root} | self.commits
        for name, root in known.items():
            commit = hashlib.sha1(f"{name}:{root}".encode()).hexdigest()
            if revision in (name, commit):
                return commit, root
        return None


class Handler(BaseHTTPRequestHandler):
    """Answers for the repositories of the server."""

    repos: ClassVar[dict[tuple[str, str], Repo]] = {}
    requests: ClassVar[list[str]] = []
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.requests.append(f"{self.command} {path}")
        api, file = _API.match(path), _FILE.match(path)
        if api:
            kind, name, what, revision, folder = (part or "" for part in api.groups())
            what, revision = what or "revision", revision or "main"
        elif file:
            kind, name, revision = "datasets" if file[1] else "models", file[2], file[3]
        else:
            return self._fail(404, "EntryNotFound", f"no such page: {path}")
        repo = self._allowed(kind, name)
        if repo is None:
            return None
        found = repo.resolve(revision)
        if found is None:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, root = found
        if file:
            return self._file(repo, commit, root, file[4])
        if what == "revision":
            siblings = [{"rfilename": name} for name in _names(root)]
            return self._json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})
        return self._json([_entry(root, item) for item in _names(root) if item.startswith(folder)])

    def _allowed(self, kind: str, name: str) -> Repo | None:
        repo = self.repos.get((kind, name))
        sent = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if sent == "expired":
            self._fail(401, None, "Invalid credentials in Authorization header")
        elif repo is None:
            self._fail(404 if sent else 401, "RepoNotFound" if sent else None, "Repository not found")
        elif repo.status is not None:
            self._fail(repo.status, None, "on purpose")
        elif repo.token is not None and sent != repo.token:
            status, code = (403 if sent else 401, "GatedRepo") if repo.gated else (404, "RepoNotFound")
            self._fail(status, code, "Access to this repository is restricted")
        else:
            return repo
        return None

    def _file(self, repo: Repo, commit: str, root: Path, name: str) -> None:
        path = root / name
        if not path.is_file():
            return self._fail(404, "EntryNotFound", f"{name} does not exist")
        data = path.read_bytes()
        sha = hashlib.sha256(data).hexdigest()
        etag = sha if name.endswith(LFS) else hashlib.sha1(data).hexdigest()
        if name in repo.damage and self.command == "GET":
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if name.endswith(LFS):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, end = int(asked[1]), int(asked[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data = data[start : end + 1]
        return self._send(206 if asked else 200, data, headers | {"Content-Type": "application/octet-stream"})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers | {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _names(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]


def _entry(root: Path, name: str) -> dict[str, Any]:
    data = (root / name).read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if name.endswith(LFS):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


@dataclass
class Hub:
    """A running server.

    Attributes:
        endpoint: its address, for HF_ENDPOINT.
        requests: what was asked, as `METHOD path`.
    """

    endpoint: str
    repos: dict[tuple[str, str], Repo]
    requests: list[str]

    def add(self, name: str, repo: Repo) -> None:
        """Serve a repository."""
        self.repos[repo.kind, name] = repo


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Run a server until the block ends."""
    repos: dict[tuple[str, str], Repo] = {}
    requests: list[str] = []
    handler = type("HubHandler", (Handler,), {"repos": repos, "requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield Hub(f"http://127.0.0.1:{server.server_address[1]}", repos, requests)
        finally:
            server.shutdown()
            thread.join()
