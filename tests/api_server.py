"""A stand-in for the Kubernetes API server, on loopback: it speaks the protocol (lists in pages, watches with bookmarks,
patches, server-side apply, logs, Status errors) and knows no controllers: a test plays those by `put` and `change`.

Faults are injected by `server.faults`: functions of the request that may answer in its place.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Manifest = dict[str, Any]
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ")
"""The time that the kubelet puts in front of a line, if it is asked to."""
CLUSTER_SCOPED = ("clustertrainingruntimes", "namespaces")


@dataclass
class Request:
    """One request as a fault sees it."""

    method: str
    path: str
    query: dict[str, str]
    body: Manifest | None
    handler: Any

    def answer(self, status: int, body: Manifest | None = None, headers: dict[str, str] | None = None) -> bool:
        """Answer with JSON; always True, so that a fault can return it."""
        self.handler.send(status, body or {}, headers or {})
        return True

    def refuse(self, status: int, message: str, **headers: str) -> bool:
        """Answer with a Status object."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.answer(status, status_object(status, message), named)

    def cut(self) -> bool:
        """Close the connection without an answer."""
        self.handler.close_connection = True
        with contextlib.suppress(OSError):
            self.handler.connection.shutdown(2)
        return True


Fault = Callable[[Request], bool]


def status_object(code: int, message: str, **details: str) -> Manifest:
    """The API server's own error."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return status | ({"details": details} if details else {})


@dataclass
class ApiServer:
    """The objects, their history, and what to answer.

    Attributes:
        faults: asked in order for every request; the first that returns True has answered.
        logs: text by (pod, container).
        requests: method and path of every request so far.
    """

    namespace: str = "team"
    faults: list[Fault] = field(default_factory=list)
    logs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    admission: list[Callable[[Manifest], str | None]] = field(default_factory=list)
    """Each may refuse a created object with a message."""
    roles: list[Manifest] | None = None
    """ClusterRoles that the caller has; None: all rights."""
    groups: frozenset[str] = frozenset({"", "batch", "trainer.kubeflow.org", "jobset.x-k8s.io"})
    """API groups that this server knows."""
    used: set[tuple[str, str, str]] = field(default_factory=set)
    """The rights (group, resource, verb) that the requests so far needed."""
    bodies: list[tuple[str, str, Manifest | None]] = field(default_factory=list)
    """Method, path and body of every request that carried one."""

    def __post_init__(self) -> None:
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.history: list[tuple[int, str, str, Manifest]] = []
        self.forgotten = 0
        """Versions up to this one have expired."""
        self._version = itertools.count(1)
        self.version = 0
        self.condition = threading.Condition()
        self.generation = 0
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for it."""
        contexts = [
            {"name": "stand-in", "context": {"cluster": "c", "user": "u", "namespace": self.namespace}},
            {"name": "other", "context": {"cluster": "c", "user": "u", "namespace": "elsewhere"}},
        ]
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "stand-in", "contexts": contexts,
            "clusters": [{"name": "c", "cluster": {"server": self.url}}], "users": [{"name": "u", "user": {"token": "t0ken"}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        return path

    # -- what a test does in the place of controllers

    def put(self, plural: str, item: Manifest, namespace: str | None = None) -> Manifest:
        """Create or replace an object."""
        item = copy.deepcopy(item)
        metadata = item.setdefault("metadata", {})
        if plural not in CLUSTER_SCOPED:
            metadata.setdefault("namespace", namespace or self.namespace)
        key = (self._collection(plural, metadata.get("namespace")), metadata["name"])
        with self.condition:
            old = self.objects.get(key)
            metadata.setdefault("uid", (old or {}).get("metadata", {}).get("uid") or str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            self._store(key, item, "MODIFIED" if old else "ADDED")
        return item

    def change(self, plural: str, name: str, **fields: Any) -> Manifest:
        """Merge fields into an object (`status={...}`)."""
        key = (self._collection(plural, None if plural in CLUSTER_SCOPED else self.namespace), name)
        with self.condition:
            item = merged(self.objects[key], fields)
            self._store(key, item, "MODIFIED")
        return item

    def remove(self, plural: str, name: str) -> None:
        """Delete an object, and what it owns, as the garbage collector does."""
        key = (self._collection(plural, None if plural in CLUSTER_SCOPED else self.namespace), name)
        with self.condition:
            item = copy.deepcopy(self.objects.pop(key))
            self._store(key, item, "DELETED")
        for (collection, owned), other in list(self.objects.items()):
            owners = other["metadata"].get("ownerReferences") or []
            if any(owner.get("uid") == item["metadata"]["uid"] for owner in owners):
                self.remove(collection.partition("/")[2], owned)

    def all(self, plural: str) -> dict[str, Manifest]:
        """The objects of a collection by name."""
        where = self._collection(plural, None if plural in CLUSTER_SCOPED else self.namespace)
        return {name: item for (collection, name), item in self.objects.items() if collection == where}

    def forget(self) -> None:
        """Every version so far has expired: watches from them get 410."""
        with self.condition:
            self.forgotten = self.version
            self.history.clear()
            self.condition.notify_all()

    def hang_up(self) -> None:
        """End every running watch, as a server that restarts does."""
        with self.condition:
            self.generation += 1
            self.condition.notify_all()

    # -- inside

    def _collection(self, plural: str, namespace: str | None) -> str:
        return f"{namespace or ''}/{plural}"

    def _store(self, key: tuple[str, str], item: Manifest, what: str) -> None:
        self.version = next(self._version)
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self.version)
        if what != "DELETED":
            self.objects[key] = item
        self.history.append((self.version, key[0], what, item))
        self.condition.notify_all()


def merged(base: Any, change: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    found = copy.deepcopy(base) if isinstance(base, dict) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def matches(item: Manifest, labels: str, fields: str) -> bool:
    """Whether an object fits selectors: equality, existence and `in (...)`."""
    has = item["metadata"].get("labels") or {}
    for part in [part for part in _split(labels) if part]:
        if " in (" in part:
            key, _, values = part.partition(" in (")
            if has.get(key.strip()) not in [value.strip() for value in values.rstrip(")").split(",")]:
                return False
        elif "=" not in part:
            if part not in has:
                return False
        elif has.get(part.partition("=")[0]) != part.partition("=")[2].lstrip("="):
            return False
    for part in [part for part in fields.split(",") if part]:
        path, _, value = part.partition("=")
        found: Any = item
        for step in path.split("."):
            found = found.get(step, "") if isinstance(found, dict) else ""
        if found != value.lstrip("="):
            return False
    return True


def _split(labels: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(labels):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append(labels[start:place])
            start = place + 1
    return [*parts, labels[start:]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: ApiServer

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def send(self, status: int, body: Manifest, headers: dict[str, str]) -> None:
        """A JSON answer."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def handle_one_request(self) -> None:
        with contextlib.suppress(OSError):
            super().handle_one_request()

    def _do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b""
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        body = yaml.safe_load(raw) if raw else None
        request = Request(self.command, parts.path, query, body, self)
        if body is not None:
            self.server_state.bodies.append((self.command, parts.path, body))
        self.server_state.requests.append(f"{self.command} {self.path}")
        if self.headers.get("Authorization") != "Bearer t0ken":
            request.refuse(401, "Unauthorized")
            return
        if any(fault(request) for fault in list(self.server_state.faults)):
            return
        self._serve(request)

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _do

    def _serve(self, request: Request) -> None:
        words = request.path.strip("/").split("/")
        group = "" if words[0] == "api" else words[1]
        if group not in self.server_state.groups:
            self._plain(404, "404 page not found\n")
            return
        words = words[2:] if words[0] == "api" else words[3:]
        namespace = None
        if words[0] == "namespaces" and len(words) > 2:
            namespace, words = words[1], words[2:]
        plural, name, sub = words[0], words[1] if len(words) > 1 else "", words[2] if len(words) > 2 else ""
        collection = f"{namespace or ''}/{plural}"
        if not self._may(request, group, plural, name, sub):
            resource = f"{plural}/{sub}" if sub else plural
            said = f'{resource} is forbidden: User "u" cannot do this in API group "{group}" in the namespace "{namespace}"'
            request.refuse(403, said)
            return
        if sub == "log":
            self._log(request, name)
        elif request.method == "GET" and not name and request.query.get("watch"):
            self._watch(request, collection)
        elif request.method == "GET" and not name:
            self._list(request, collection)
        else:
            self._object(request, plural, namespace, collection, name)

    def _may(self, request: Request, group: str, plural: str, name: str, sub: str) -> bool:
        """Whether one of the roles has the right, as an authorizer decides it."""
        read = "get" if name else "watch" if request.query.get("watch") else "list"
        verb = {"GET": read, "POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}[request.method]
        resource = f"{plural}/{sub}" if sub else plural
        self.server_state.used.add((group, resource, verb))
        return self.server_state.roles is None or any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for role in self.server_state.roles for rule in role["rules"]
        )  # fmt: skip

    def _plain(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _object(self, request: Request, plural: str, namespace: str | None, collection: str, name: str) -> None:
        state, body = self.server_state, request.body or {}
        name = name or (body.get("metadata") or {}).get("name", "")
        there = state.objects.get((collection, name))
        dry = request.query.get("dryRun") == "All"
        if request.method == "POST":
            if there is not None:
                request.refuse(409, f'{plural} "{name}" already exists')
                return
            refused = next((said for check in state.admission if (said := check(body))), None)
            if refused is not None:
                request.refuse(400, refused)
                return
            request.answer(201, body if dry else state.put(plural, body, namespace))
            return
        is_apply = "apply-patch" in (self.headers.get("Content-Type") or "")
        if there is None and not is_apply:
            request.answer(404, status_object(404, f'{plural} "{name}" not found', name=name, kind=plural))
        elif request.method == "GET":
            request.answer(200, there)
        elif request.method == "PATCH":
            item = merged(there or {}, body)
            request.answer(200, item if dry else state.put(plural, item, namespace))
        elif request.method == "DELETE":
            state.remove(plural, name) if not dry else None
            request.answer(200, {"kind": "Status", "status": "Success"})
        else:
            request.refuse(405, "method not allowed")

    def _list(self, request: Request, collection: str) -> None:
        state = self.server_state
        labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        limit, start = int(request.query.get("limit") or 0), 0
        if token := request.query.get("continue"):
            start, version = (int(part) for part in token.split("-"))
            if version <= state.forgotten:
                request.refuse(410, "The provided continue parameter is too old")
                return
        with state.condition:
            found = [
                item for (where, _), item in sorted(state.objects.items())
                if where == collection and matches(item, labels, fields)
            ]  # fmt: skip
            metadata = {"resourceVersion": str(state.version)}
        page = found[start : start + limit] if limit else found
        if limit and start + limit < len(found):
            metadata["continue"] = f"{start + limit}-{state.version}"
        request.answer(200, {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": page})

    def _log(self, request: Request, pod: str) -> None:
        previous = "!previous" if request.query.get("previous") == "true" else ""
        key = (pod, request.query.get("container", "") + previous)
        state = self.server_state
        if key not in state.logs:
            request.refuse(400, f'container "{key[1]}" in pod "{pod}" is waiting to start: ContainerCreating')
            return
        since = request.query.get("sinceTime", "")
        self._start_stream()
        sent, generation = 0, state.generation
        while True:
            with state.condition:
                lines = state.logs[key][sent:]
                sent += len(lines)
            for line in lines:
                shown = line if request.query.get("timestamps") == "true" else STAMP.sub("", line)
                if line[:19] >= since[:19] and not self._chunk(shown + "\n"):
                    return
            ended = state.objects.get((f"{state.namespace}/pods", pod), {}).get("status", {}).get("phase")
            if request.query.get("follow") != "true" or ended in (None, "Succeeded", "Failed"):
                if sent == len(state.logs[key]):
                    self._end_stream()
                    return
            elif state.generation != generation:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(2)
                return
            time.sleep(0.02)

    def _watch(self, request: Request, collection: str) -> None:
        state = self.server_state
        version = int(request.query.get("resourceVersion") or 0)
        labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
        deadline = time.monotonic() + float(request.query.get("timeoutSeconds") or 60)
        generation = state.generation
        if version < state.forgotten:
            request.refuse(410, "too old resource version")
            return
        self._start_stream()
        while time.monotonic() < deadline:
            with state.condition:
                if generation != state.generation:
                    break
                if version < state.forgotten:
                    self._event("ERROR", status_object(410, "too old resource version"))
                    break
                fresh = [entry for entry in state.history if entry[0] > version and entry[1] == collection]
                latest = state.version
                if not fresh:
                    state.condition.wait(min(0.2, max(0.0, deadline - time.monotonic())))
            for number, _, what, item in fresh:
                version = number
                if matches(item, labels, fields) and not self._event(what, item):
                    return
            if not fresh and request.query.get("allowWatchBookmarks") and latest > version:
                version = latest
                if not self._event("BOOKMARK", {"metadata": {"resourceVersion": str(latest)}}):
                    return
        self._end_stream()

    def _event(self, what: str, item: Manifest) -> bool:
        return self._chunk(json.dumps({"type": what, "object": item}) + "\n")

    def _start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> bool:
        data = text.encode()
        try:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        except OSError:
            return False
        return True

    def _end_stream(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")


@contextlib.contextmanager
def serving(namespace: str = "team") -> Iterator[ApiServer]:
    """A stand-in that serves for the block."""
    server = ApiServer(namespace)
    try:
        yield server
    finally:
        server.close()


def times(count: int, fault: Fault) -> Fault:
    """A fault that happens the first `count` times only."""
    left = [count]

    def once(request: Request) -> bool:
        if left[0] <= 0:
            return False
        if fault(request):
            left[0] -= 1
            return True
        return False

    return once
