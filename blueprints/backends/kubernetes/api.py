"""The API server: every call with a timeout and a bounded number of retries, lists in pages, watches that survive.

The calls go through the `kubernetes` package's client, which knows kubeconfig, certificates and tokens; objects are plain
data. What the server or the network answers is translated here into this product's errors.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config
from kubernetes.client import ApiException

from blueprints.errors import EnvironmentFault, UsageError
from blueprints.runtimes import Manifest

PAGE = 500
"""Objects per page of a list."""
ATTEMPTS = 6
"""Times a call is tried."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds before the second attempt, doubled each time, and the most of it; a server's Retry-After counts instead."""
CONNECT_SECONDS, READ_SECONDS = 5.0, 60.0
WATCH_SECONDS = 240
"""A watch is asked to end after so long, and begun again."""
PRODUCTS = {"trainer.kubeflow.org": "Kubeflow Trainer", "jobset.x-k8s.io": "JobSet", "kueue.x-k8s.io": "Kueue"}
"""What brings a group of kinds into a cluster."""
TRANSIENT = (408, 429, 500, 502, 503, 504)
DEFAULT_CONFIG = Path("~/.kube/config")
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Kind:
    """A kind of objects and where the API server has them."""

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        """The URL's path of the collection, or of one object or its subresource."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, *(["namespaces", quote(namespace, safe="")] if self.namespaced else []), self.plural]
        return "/".join([*parts, *([quote(name, safe="")] if name else []), *([sub] if sub else [])])

    def named(self, item: Manifest) -> Manifest:
        """An item of a list with the kind and version that lists leave out."""
        return {"apiVersion": f"{self.group}/{self.version}" if self.group else self.version, "kind": self.kind, **item}


TRAINJOBS = Kind("TrainJob", "trainjobs", "trainer.kubeflow.org", "v1alpha1")
CLUSTER_RUNTIMES = Kind(
    "ClusterTrainingRuntime", "clustertrainingruntimes", "trainer.kubeflow.org", "v1alpha1", namespaced=False
)
RUNTIMES = Kind("TrainingRuntime", "trainingruntimes", "trainer.kubeflow.org", "v1alpha1")
JOBSETS = Kind("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2")
JOBS = Kind("Job", "jobs", "batch")
WORKLOADS = tuple(Kind("Workload", "workloads", "kueue.x-k8s.io", version) for version in ("v1beta1", "v1beta2"))
"""Kueue serves the older version, the newer one or both."""
PODS = Kind("Pod", "pods")
EVENTS = Kind("Event", "events")
SECRETS = Kind("Secret", "secrets")
CLAIMS = Kind("PersistentVolumeClaim", "persistentvolumeclaims")


class ApiError(EnvironmentFault):
    """The API server refused a call, or could not be reached: exit code 5.

    Attributes:
        status: HTTP status; 0 where no answer came.
        body: the Status object of the answer.
    """

    def __init__(self, problem: str, *, where: str, todo: str, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(problem, where=where, todo=todo)
        self.status, self.body = status, body

    @property
    def unknown_kind(self) -> bool:
        """Whether the server does not know the kind of object at all; of a missing object it says which one."""
        return self.status == 404 and not (self.body.get("details") or {}).get("name")


class GoneError(Exception):
    """The resource version of a watch or of a page has expired: list again."""


@dataclass
class Cluster:
    """One API server, seen from one namespace.

    Args:
        client: the `kubernetes` package's client.
        namespace: where jobs are.
        server: its address, for messages.
        attempts: times a call is tried.
        pause: waits between attempts.
    """

    client: Any
    namespace: str
    server: str = ""
    attempts: int = ATTEMPTS
    pause: Callable[[float], None] = time.sleep
    context: str | None = None

    @classmethod
    def connect(
        cls, *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
    ) -> Cluster:
        """Reach the cluster that a kubeconfig names, or, in a Pod without one, the cluster it runs in.

        Args:
            kubeconfig: path of the file. Default: `$KUBECONFIG`, else `~/.kube/config`.
            context: of the file. Default: its current one.
            namespace: default: the context's or the Pod's own, else `default`.

        Raises:
            UsageError: there is no configuration, or no such context.
        """
        configuration = kubernetes_client.Configuration()
        # The library reads the variable only once, when it is imported.
        kubeconfig = kubeconfig or os.environ.get("KUBECONFIG") or None
        named = kubeconfig or context or DEFAULT_CONFIG.expanduser().exists()
        in_pod = NAMESPACE_FILE.exists() and not named
        try:
            if in_pod:
                kubernetes_config.load_incluster_config(client_configuration=configuration)
                found: str | None = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
            else:
                kubernetes_config.load_kube_config(
                    config_file=kubeconfig, context=context, client_configuration=configuration
                )
                found = _namespace_of(kubeconfig, context)
        except (kubernetes_config.ConfigException, OSError, ValueError) as error:
            raise UsageError(
                f"no cluster is configured: {error}",
                where=f"kubeconfig {kubeconfig or '($KUBECONFIG or ~/.kube/config)'}",
                todo="set KUBECONFIG, or name another file or context; `kubectl cluster-info` must work",
            ) from None
        configuration.retries = False  # repeats are made here, where they are counted
        client = kubernetes_client.ApiClient(configuration)
        return cls(client, namespace or found or "default", server=str(configuration.host), context=context)

    # -- calls

    def get(self, kind: Kind, name: str) -> Manifest:
        """One object.

        Raises:
            ApiError: 404 if there is none.
        """
        return self._json("GET", kind.path(self.namespace, name))

    def find(self, kind: Kind, name: str) -> Manifest | None:
        """One object, None if there is none.

        Raises:
            ApiError: also where the cluster does not know that kind of object.
        """
        try:
            return self.get(kind, name)
        except ApiError as error:
            if error.status == 404 and not error.unknown_kind:
                return None
            raise

    def pages(self, kind: Kind, *, labels: str = "", fields: str = "") -> Iterator[Manifest]:
        """The pages of a list, as the server sends them; begun again if the server has forgotten the list."""
        seen_all = False
        while not seen_all:
            token, pages = "", []
            try:
                while True:
                    page = self._list(kind, labels, fields, limit=PAGE, token=token)
                    pages.append(page)
                    token = (page.get("metadata") or {}).get("continue") or ""
                    if not token:
                        break
                seen_all = True
            except GoneError:
                continue  # half a list is no list
            yield from pages

    def find_all(self, kind: Kind, *, labels: str = "", fields: str = "") -> list[Manifest]:
        """All objects of a kind that match the selectors."""
        found: list[Manifest] = []
        for page in self.pages(kind, labels=labels, fields=fields):
            found += [kind.named(item) for item in page.get("items") or []]
        return found

    def create(self, kind: Kind, body: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object. Where an answer was lost and the object is there, with equal spec, that is a success.

        Raises:
            ApiError: the server refuses it.
        """
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        unsure: list[int] = []
        try:
            return self._json("POST", kind.path(self.namespace), query=query, body=body, unsure=unsure)
        except ApiError as error:
            if error.status != 409 or not unsure:
                raise
            there = self.get(kind, body["metadata"]["name"])
            if _ours(there, body):
                return there
            raise

    def patch(self, kind: Kind, name: str, body: Manifest) -> Manifest:
        """Merge `body` into an object (JSON merge patch)."""
        path = kind.path(self.namespace, name)
        return self._json("PATCH", path, body=body, content="application/merge-patch+json")

    def apply(
        self, kind: Kind, body: Manifest, *, manager: str, dry_run: bool = False, force: bool = False
    ) -> Manifest:
        """Server-side apply.

        Raises:
            ApiError: 409 if another manager owns a field and `force` is not given.
        """
        query = [("fieldManager", manager), ("fieldValidation", "Strict"), ("force", str(force).lower())]
        query += [("dryRun", "All")] if dry_run else []
        path = kind.path(self.namespace, body["metadata"]["name"])
        return self._json("PATCH", path, query=query, body=body, content="application/apply-patch+yaml")

    def delete(self, kind: Kind, name: str, *, uid: str | None = None) -> bool:
        """Delete an object in the background: with foreground deletion an unfinished TrainJob never goes.

        Returns:
            False if it was gone already.
        """
        body: Manifest = {"propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", kind.path(self.namespace, name), body=body)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def log(
        self,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> Iterator[str]:
        """Lines of a container's log, each with its time in front (RFC 3339, then a space).

        Args:
            since: only lines from this time on (whole seconds count).
            tail: only so many lines, the last ones.
            previous: of the container before it was started again.

        Raises:
            ApiError: the log cannot be read; a cut connection ends the iteration instead.
        """
        query = [("container", container), ("timestamps", "true"), ("follow", str(follow).lower())]
        query += [("sinceTime", since)] if since else []
        query += [("tailLines", str(tail))] if tail is not None else []
        query += [("previous", "true")] if previous else []
        response = self._call("GET", PODS.path(self.namespace, pod, "log"), query=query, stream=True)
        try:
            yield from _lines(response)
        except urllib3.exceptions.HTTPError:
            return  # the caller asks again from the last line on
        finally:
            response.release_conn()

    # -- watching

    def watch(
        self, kind: Kind, *, version: str, labels: str = "", fields: str = "", seconds: float = WATCH_SECONDS
    ) -> Iterator[Manifest]:
        """Changes after `version`, as the server sends them (`{"type", "object"}`), until the connection ends.

        Raises:
            GoneError: the version has expired.
            ApiError: the server refuses.
        """
        query = [
            ("watch", "true"), ("resourceVersion", version), ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(max(1, int(seconds)))), *_selectors(labels, fields),
        ]  # fmt: skip
        try:
            response = self._call("GET", kind.path(self.namespace), query=query, stream=True, read=seconds + 30)
        except ApiError as error:
            if error.status == 410:
                raise GoneError from None
            raise
        try:
            for line in _lines(response):
                event = json.loads(line)
                if event.get("type") == "ERROR":
                    if (event.get("object") or {}).get("code") == 410:
                        raise GoneError
                    return
                yield event
        except (urllib3.exceptions.HTTPError, ValueError):
            return  # cut in the middle of a line: the caller goes on from the last version it has seen
        finally:
            response.release_conn()

    # -- the wire

    def _list(self, kind: Kind, labels: str, fields: str, *, limit: int, token: str) -> Manifest:
        query = [("limit", str(limit)), *_selectors(labels, fields), *([("continue", token)] if token else [])]
        try:
            return self._json("GET", kind.path(self.namespace), query=query)
        except ApiError as error:
            if error.status == 410:
                raise GoneError from None
            raise

    def _json(self, method: str, path: str, **how: Any) -> Manifest:
        response = self._call(method, path, **how)
        try:
            data: Manifest = json.loads(response.data or b"{}")
        except ValueError as error:
            raise ApiError(
                f"the answer is not JSON: {error}", where=f"{method} {self.server}{path}",
                todo="is this the address of a Kubernetes API server?", status=0, body={},
            ) from None  # fmt: skip
        return data

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Manifest | None = None,
        content: str = "application/json",
        stream: bool = False,
        read: float = READ_SECONDS,
        unsure: list[int] | None = None,
    ) -> Any:
        """Call until an answer that is final; `unsure` gets the attempts whose outcome nobody knows.

        Raises:
            ApiError: the answer is a refusal, or none came in `attempts` attempts.
        """
        headers = {"Accept": "*/*" if stream else "application/json", "Content-Type": content}
        for attempt in range(1, self.attempts + 1):
            pause = _pause(attempt)
            try:
                return self.client.call_api(
                    path, method, query_params=list(query), header_params=dict(headers), body=body,
                    auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
                    _request_timeout=(CONNECT_SECONDS, read),
                )  # fmt: skip
            except ApiException as error:
                if error.status not in TRANSIENT or attempt == self.attempts:
                    raise self._refusal(method, path, error) from None
                pause = _retry_after(error) or pause
                if error.status >= 500 and unsure is not None:
                    unsure.append(attempt)
            except urllib3.exceptions.HTTPError as error:
                if attempt == self.attempts or "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise self._unreachable(method, path, error) from None
                if unsure is not None:
                    unsure.append(attempt)
            self.pause(pause)
        raise AssertionError  # the last attempt returns or raises

    def _refusal(self, method: str, path: str, error: Any) -> ApiError:
        text = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
        try:
            body = json.loads(text)
        except ValueError:
            body = {}
        body = body if isinstance(body, dict) else {}
        said = str(body.get("message") or text.strip() or error.reason)
        todo = {
            401: "log in again: the token or certificate in the kubeconfig is not accepted",
            403: "ask for the role in runtimes/rbac, or use a namespace where you may do this (--namespace)",
            404: "is the name right, and is Kubeflow Trainer installed in this cluster?",
            409: "another object or owner is there already",
            422: "correct what it names",
        }.get(error.status, "see what the server says")
        where = f"{method} {self.server}{path}"
        refusal = ApiError(said, where=where, todo=todo, status=int(error.status or 0), body=body)
        if refusal.unknown_kind and "/apis/" in path and body.get("kind") != "Status":
            group = path.split("/")[2]
            missing = PRODUCTS.get(group)
            if missing is not None:
                todo = f"install {missing}, or choose the cluster that has it (--context)"
                return ApiError(
                    f"this cluster has no {missing}: it does not know {group}",
                    where=where,
                    todo=todo,
                    status=404,
                    body={},
                )
        return refusal

    def _unreachable(self, method: str, path: str, error: Exception) -> ApiError:
        return ApiError(
            f"the API server cannot be reached: {_reason(error)}",
            where=f"{method} {self.server}{path}",
            todo="does `kubectl cluster-info` work? Is the address in the kubeconfig right?",
            status=0,
            body={},
        )


@dataclass
class Informer:
    """The objects of a kind that match selectors, kept up to date by list and watch in a thread.

    Args:
        notify: called from that thread with every state of the objects that differs from the one before, the first list
            included, and at last once more if it has failed for good.
        wanted: objects that are not are left out.

    Attributes:
        objects: by uid, as they are now; each change is a new mapping.
        failure: what made it end for good; None while it works.
    """

    cluster: Cluster
    kind: Kind
    notify: Callable[[Mapping[str, Manifest]], None]
    labels: str = ""
    fields: str = ""
    wanted: Callable[[Manifest], bool] = lambda _: True
    objects: Mapping[str, Manifest] = field(default_factory=dict)
    failure: ApiError | None = None
    lists: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _listed: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Informer:
        """Begin; returns when the first list is there.

        Raises:
            ApiError: the first list failed.
        """
        threading.Thread(target=self._run, daemon=True, name=f"watch {self.kind.plural}").start()
        self._listed.wait()
        if self.failure is not None and not self.lists:
            raise self.failure
        return self

    def stop(self) -> None:
        """End at the next change or timeout; the thread does not keep the process alive."""
        self._stopped.set()

    def items(self) -> list[Manifest]:
        """The objects as they are now."""
        return list(self.objects.values())

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                version = self._relist()
                failures = 0
                while not self._stopped.is_set():
                    version = self._follow(version)
            except GoneError:
                continue
            except ApiError as error:
                failures += 1
                # A server that restarts refuses for a while; what it refuses for good, it refuses again.
                if error.status in (401, 403, 404) or failures > self.cluster.attempts:
                    self.failure = error
                    self._listed.set()
                    self.notify(self.objects)
                    return
                self._stopped.wait(_pause(failures))

    def _relist(self) -> str:
        found: dict[str, Manifest] = {}
        version = "0"
        for page in self.cluster.pages(self.kind, labels=self.labels, fields=self.fields):
            version = str((page.get("metadata") or {}).get("resourceVersion") or version)
            for item in page.get("items") or []:
                if self.wanted(item):
                    found[item["metadata"]["uid"]] = self.kind.named(item)
        if not self.lists or _versions(found) != _versions(self.objects):
            self.objects = found
            self.notify(found)
        self.lists += 1
        self._listed.set()
        return version

    def _follow(self, version: str) -> str:
        """Take up changes until the connection ends; returns the last version seen."""
        began = time.monotonic()
        for event in self.cluster.watch(self.kind, version=version, labels=self.labels, fields=self.fields):
            item = event.get("object") or {}
            version = str(item.get("metadata", {}).get("resourceVersion") or version)
            if self._stopped.is_set():
                break
            if event.get("type") != "BOOKMARK" and self.wanted(item):
                self._take(str(event.get("type")), item)
        if time.monotonic() - began < 1:
            self._stopped.wait(FIRST_PAUSE)  # a server that hangs up at once is not asked in a tight loop
        return version

    def _take(self, what: str, item: Manifest) -> None:
        uid = item["metadata"]["uid"]
        before = self.objects.get(uid)
        objects = dict(self.objects)
        if what == "DELETED":
            if objects.pop(uid, None) is None:
                return
        elif before is not None and _version(before) == _version(item):
            return
        else:
            objects[uid] = self.kind.named(item)
        self.objects = objects
        self.notify(objects)


def _version(item: Manifest) -> str:
    return str(item["metadata"].get("resourceVersion"))


def _versions(objects: Mapping[str, Manifest]) -> dict[str, str]:
    return {uid: _version(item) for uid, item in objects.items()}


def _lines(response: Any) -> Iterator[str]:
    """Whole lines of a streamed answer; a last one without a line break counts as well."""
    rest = b""
    for chunk in response.stream(2**16, decode_content=True):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _selectors(labels: str, fields: str) -> list[tuple[str, str]]:
    return [*([("labelSelector", labels)] if labels else []), *([("fieldSelector", fields)] if fields else [])]


def _pause(attempt: int) -> float:
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)  # clients that failed together do not come back together


def _retry_after(error: Any) -> float | None:
    value = (error.headers or {}).get("Retry-After")
    try:
        return min(60.0, max(0.0, float(value))) if value is not None else None
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    inner: Any = vars(error).get("reason", error)
    text = str(inner) or type(inner).__name__
    return text.split(">: ")[-1] if ">: " in text else text


def _ours(there: Manifest, body: Manifest) -> bool:
    """Whether an object is the one that a call without an answer has made."""
    wanted = body["metadata"].get("annotations") or {}
    has = there["metadata"].get("annotations") or {}
    return all(has.get(key) == value for key, value in wanted.items()) and bool(wanted)


def _namespace_of(kubeconfig: str | None, context: str | None) -> str | None:
    contexts, active = kubernetes_config.list_kube_config_contexts(config_file=kubeconfig)
    chosen = next((item for item in contexts if item["name"] == context), active) if context else active
    return (chosen.get("context") or {}).get("namespace") if chosen else None
