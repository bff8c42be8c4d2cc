"""Tokens of the Hub and of stores: from this machine's environment or login into a Secret that belongs to the job.

No value of a token is ever in a manifest, an argument or a log: only in the Secret, which goes with the job.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from blueprints.backends.kubernetes import api
from blueprints.backends.kubernetes.api import ApiError, Cluster
from blueprints.runtimes import Manifest
from blueprints.trainjob import MANAGED_BY

SUFFIX = "-tokens"
VARIABLES = (
    "HF_TOKEN", "ACCESS_TOKEN", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)  # fmt: skip
"""Variables that are taken along, where they are set and the job's sources use them."""


def tokens_from(job: Manifest, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tokens that the job's sources need and this machine has; none where the job names a Secret itself."""
    env = os.environ if environ is None else environ
    initializer = (job.get("spec") or {}).get("initializer") or {}
    sources = [source for source in initializer.values() if source and not source.get("secretRef")]
    schemes = {str(source.get("storageUri", "")).partition("://")[0] for source in sources}
    found = {name: env[name].strip() for name in VARIABLES if env.get(name, "").strip()}
    wanted: dict[str, str] = {}
    if "hf" in schemes:
        wanted |= {name: value for name, value in found.items() if name in ("HF_TOKEN", "ACCESS_TOKEN")}
        if not wanted and (login := hub_login(env)):
            wanted["HF_TOKEN"] = login
    if "s3" in schemes:
        wanted |= {name: value for name, value in found.items() if "KEY" in name or name == "AWS_SESSION_TOKEN"}
    return wanted


def hub_login(environ: Mapping[str, str]) -> str | None:
    """The token that `hf auth login` has stored."""
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    path = Path(environ.get("HF_TOKEN_PATH") or Path(home) / "token").expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def give_tokens(cluster: Cluster, job: Manifest, tokens: Mapping[str, str]) -> Callable[[Manifest], None]:
    """Create the Secret and let the job's initializers refer to it.

    Args:
        job: changed: initializers without a Secret of their own get this one.

    Returns:
        what makes the created TrainJob the Secret's owner, so that it is deleted with it.
    """
    name = job["metadata"]["name"] + SUFFIX
    body: Manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "labels": dict(MANAGED_BY),
            "annotations": dict(job["metadata"].get("annotations") or {}),
        },
        "type": "Opaque",
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in tokens.items()},
    }
    try:
        cluster.create(api.SECRETS, body)
    except ApiError as error:
        if error.status != 409:
            raise
        cluster.delete(api.SECRETS, name)  # left by a job of that name that was removed otherwise
        cluster.create(api.SECRETS, body)
    for source in (job["spec"].get("initializer") or {}).values():
        if source and not source.get("secretRef"):
            source["secretRef"] = {"name": name}

    def own(created: Manifest) -> None:
        owner = {
            "apiVersion": created["apiVersion"], "kind": "TrainJob", "name": created["metadata"]["name"],
            "uid": created["metadata"]["uid"],
        }  # fmt: skip
        cluster.patch(api.SECRETS, name, {"metadata": {"ownerReferences": [owner]}})

    return own


def delete_tokens(cluster: Cluster, job: str) -> None:
    """Remove the Secret of a job, if it is ours."""
    name = job + SUFFIX
    there = cluster.find(api.SECRETS, name)
    labels = ((there or {}).get("metadata") or {}).get("labels") or {}
    if there is not None and labels.items() >= MANAGED_BY.items():
        cluster.delete(api.SECRETS, name)
