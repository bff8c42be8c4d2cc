"""The shipped runtimes in a cluster: what is there, what would change, and changing it by server-side apply.

Only objects with our label are ever changed, only the fields we set, and nothing is written before the API server has
accepted a dry run of everything.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml

from blueprints.errors import BlueprintError, EnvironmentFault, Fault, ManifestError, UsageError
from blueprints.runtimes import MANAGED_BY, PRODUCT, Manifest

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

FIELD_MANAGER = "llm-blueprints"
PATH = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
RETRIED = (429, 500, 502, 503, 504)
PAUSES = (0.5, 1.0, 2.0)
"""Seconds before each repetition of a call; every call here may be repeated."""
_SERVER_FIELDS = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation")

State = Literal["new", "changed", "unchanged"]


@dataclass(frozen=True)
class Change:
    """What installing a runtime does to the cluster.

    Attributes:
        manifest: the runtime as shipped.
        state: `new`, `changed` or `unchanged`.
        diff: unified diff of the cluster's object before and after, empty if unchanged.
    """

    manifest: Manifest
    state: State
    diff: str

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


class Cluster:
    """The ClusterTrainingRuntimes of one cluster.

    Args:
        kubeconfig: file. Default: `$KUBECONFIG`, `~/.kube/config`, else the Pod's own service account.
        context: of the file. Default: its current one.
        timeout: seconds for each call.

    Raises:
        EnvironmentFault: the kubernetes package or a usable configuration is missing.
    """

    def __init__(self, kubeconfig: str | None = None, context: str | None = None, *, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self._client = _connect(kubeconfig, context)

    @property
    def address(self) -> str:
        """The API server."""
        return str(self._client.configuration.host)

    def get(self, name: str) -> Manifest | None:
        """The installed runtime `name`, None if there is none."""
        status, body = self._call("GET", f"{PATH}/{name}")
        return None if status == 404 else body

    def apply(self, manifest: Manifest, *, dry_run: bool) -> Manifest:
        """Create or change one runtime by server-side apply.

        Returns:
            the object as the API server has it afterwards, or with `dry_run` would have it.

        Raises:
            UsageError: it refuses: invalid, an immutable field changed, or a field belongs to another manager.
        """
        name = manifest["metadata"]["name"]
        query = [("fieldManager", FIELD_MANAGER), ("fieldValidation", "Strict")]
        status, body = self._call(
            "PATCH", f"{PATH}/{name}", [*query, *([("dryRun", "All")] if dry_run else [])], manifest
        )
        if status < 300:
            return body
        message = str(body.get("message") or body)
        if status == 404:
            todo = "install Kubeflow Trainer 2.3 first: the kind ClusterTrainingRuntime is unknown here"
            raise EnvironmentFault(message, where=self.address, todo=todo)
        if status == 409:
            todo = "another tool has set these fields: change them there, or delete the runtime and apply again"
        elif "immutable" in message:
            todo = (
                "this version is installed with another content: give the changed runtimes a new version (nameSuffix)"
            )
        else:
            todo = "the API server refuses it; `blueprints runtimes render` shows what was sent"
        raise UsageError(message, where=f"ClusterTrainingRuntime {name}", todo=todo)

    def _call(
        self, method: str, path: str, query: Sequence[tuple[str, str]] = (), body: Manifest | None = None
    ) -> tuple[int, Manifest]:
        status, text = _with_retries(lambda: self._once(method, path, query, body), self.address)
        try:
            answer: Manifest = json.loads(text)
        except ValueError:
            answer = {"message": text.strip() or f"HTTP {status}"}
        if status in (401, 403) or status >= 500 or status == 429:
            todo = (
                "ask the cluster's admin for the role in runtimes/rbac"
                if status == 403
                else "try again, or see its log"
            )
            raise EnvironmentFault(f"HTTP {status}: {answer.get('message')}", where=self.address, todo=todo)
        return status, answer

    def _once(self, method: str, path: str, query: Sequence[tuple[str, str]], body: Manifest | None) -> tuple[int, str]:
        from kubernetes.client import ApiException

        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/apply-patch+yaml"
        try:
            response = self._client.call_api(
                path, method, {}, list(query), headers, body=body,
                auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
                _request_timeout=(self.timeout, self.timeout),  # a single float would be ignored
            )  # fmt: skip
        except ApiException as error:
            return int(error.status or 0), _text(error.body)
        return int(response.status), _text(response.data)


def _connect(kubeconfig: str | None, context: str | None) -> ApiClient:
    try:
        from kubernetes import config
        from kubernetes.client import ApiClient, Configuration
    except ImportError:
        todo = "pip install 'llm-blueprints[kubernetes]'"
        raise EnvironmentFault("the package kubernetes is not installed", where="cluster", todo=todo) from None
    configuration = Configuration()
    try:
        config.load_kube_config(kubeconfig, context, client_configuration=configuration)
    except config.ConfigException as error:
        if kubeconfig is None and context is None:
            try:
                config.load_incluster_config(client_configuration=configuration)
                return ApiClient(configuration)
            except config.ConfigException:
                pass  # not in a Pod either: the first error tells more
        todo = "name a file with --kubeconfig or $KUBECONFIG, and one of its contexts with --context"
        raise EnvironmentFault(str(error), where=kubeconfig or "kubeconfig", todo=todo) from None
    return ApiClient(configuration)


def _with_retries(call: Callable[[], tuple[int, str]], address: str) -> tuple[int, str]:
    from urllib3.exceptions import HTTPError

    for pause in (*PAUSES, None):
        try:
            status, text = call()
        except HTTPError as error:
            if pause is None:
                todo = "is it running, and does this machine reach it? `kubectl cluster-info` asks the same"
                raise EnvironmentFault(f"no answer from the API server: {error}", where=address, todo=todo) from None
        else:
            if status not in RETRIED or pause is None:
                break
        time.sleep(pause)
    return status, text


def _text(data: Any) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data or "")


def plan(cluster: Cluster, manifests: Sequence[Manifest]) -> list[Change]:
    """What installing the runtimes would change, by the API server's own dry run.

    Raises:
        ManifestError: one or more cannot be installed; all of them with the reason.
    """
    changes: list[Change] = []
    faults: list[Fault] = []
    for manifest in manifests:
        try:
            changes.append(_change(cluster, manifest))
        except UsageError as error:
            faults.append(Fault(error.where, "", error.problem, hint=error.todo))
    if faults:
        raise ManifestError(faults, subject=f"nothing was changed in {cluster.address}")
    return changes


def install(cluster: Cluster, changes: Sequence[Change], report: Callable[[Change], None]) -> None:
    """Make the planned changes, telling each.

    Raises:
        BlueprintError: the API server refuses one after all; the message names those already made.
    """
    made: list[str] = []
    for change in changes:
        if change.state != "unchanged":
            try:
                cluster.apply(change.manifest, dry_run=False)
            except BlueprintError as error:
                done = f"already applied: {', '.join(made)}; " if made else ""
                raise type(error)(error.problem, where=error.where, todo=done + error.todo) from None
            made.append(change.name)
        report(change)


def _change(cluster: Cluster, manifest: Manifest) -> Change:
    name = manifest["metadata"]["name"]
    live = cluster.get(name)
    owner = ((live or {}).get("metadata", {}).get("labels") or {}).get(MANAGED_BY)
    if live is not None and owner != PRODUCT:
        raise UsageError(
            f"exists and is not ours ({MANAGED_BY}: {owner or 'not set'})",
            where=f"ClusterTrainingRuntime {name}",
            todo="leave it, or delete it first",
        )
    before, after = _plain(live), _plain(cluster.apply(manifest, dry_run=True))
    if live is not None and before == after:
        return Change(manifest, "unchanged", "")
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} in the cluster", f"{name} as shipped", lineterm=""
    )
    return Change(manifest, "new" if live is None else "changed", "\n".join(lines))


def _plain(manifest: Manifest | None) -> str:
    """An object as YAML without what the server keeps for itself."""
    if manifest is None:
        return ""
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in _SERVER_FIELDS}
    return yaml.safe_dump({**manifest, "metadata": metadata}, sort_keys=True)
