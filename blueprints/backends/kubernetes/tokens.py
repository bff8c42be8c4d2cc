"""Tokens of the Hub, of stores and of trackers: from this machine's environment or login into a Secret that the job owns.

No value of a token is ever in a manifest, an argument or a log: only in the Secret, which the cluster deletes with the job.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blueprints.backends.kubernetes.api import SECRETS, Cluster
from blueprints.runtimes import Manifest
from blueprints.trainjob import MANAGED_BY

HUB = ("HF_TOKEN", "ACCESS_TOKEN")
STORE = (
    "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "ENDPOINT",
    "REGION", "ROLE_ARN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION",
)  # fmt: skip
TRACKERS = {
    "wandb": ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT"),
    "mlflow": (
        "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
    ),
    "trackio": ("HF_TOKEN", "TRACKIO_SPACE_ID"),
}  # fmt: skip
"""Variables that are taken along where they are set here and the job uses what they are for."""
_SCHEME = re.compile(r"\b(hf|s3)://")


@dataclass(frozen=True)
class Tokens:
    """What a job needs of this machine's tokens.

    Attributes:
        sources: for the initializers that name no Secret themselves.
        trainer: for the trainer.
    """

    sources: Mapping[str, str]
    trainer: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.sources or self.trainer)

    def __repr__(self) -> str:
        return f"Tokens({sorted({*self.sources, *self.trainer})})"  # never the values


def tokens_for(job: Manifest, environ: Mapping[str, str] | None = None) -> Tokens:
    """The tokens that the job's sources and trackers need and this machine has.

    Args:
        job: the TrainJob; initializers that name a Secret and variables that it sets are left alone.
        environ: default: this process's environment.
    """
    env = os.environ if environ is None else environ
    spec = job.get("spec") or {}
    sources: dict[str, str] = {}
    if any(not source.get("secretRef") for source in _sources(job)):
        schemes = set(_SCHEME.findall(json.dumps([spec.get("initializer"), (spec.get("trainer") or {}).get("args")])))
        sources = _hub(env) if "hf" in schemes else {}
        sources |= _set(env, STORE) if "s3" in schemes else {}
    trainer = spec.get("trainer") or {}
    asked = " ".join(word for word in trainer.get("args") or [] if "report_to" in word)
    own = {entry["name"] for entry in trainer.get("env") or []}
    wanted = [name for tracker, names in TRACKERS.items() if tracker in asked for name in names if name not in own]
    return Tokens(sources, _set(env, wanted))


def _sources(job: Manifest) -> list[dict[str, Any]]:
    return [source for source in ((job.get("spec") or {}).get("initializer") or {}).values() if source]


def _set(env: Mapping[str, str], names: Any) -> dict[str, str]:
    return {name: env[name].strip() for name in names if env.get(name, "").strip()}


def _hub(env: Mapping[str, str]) -> dict[str, str]:
    found = _set(env, HUB)
    login = None if found else env.get("HUGGING_FACE_HUB_TOKEN", "").strip() or hub_login(env)
    return {"HF_TOKEN": login} if login else found


def hub_login(environ: Mapping[str, str]) -> str | None:
    """The token that `hf auth login` has stored."""
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    path = Path(environ.get("HF_TOKEN_PATH") or Path(home) / "token").expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def refer(job: Manifest, tokens: Tokens) -> Manifest | None:
    """Let a job refer to a Secret of its own.

    Args:
        job: changed: initializers without a Secret get this one, the trainer variables of it.

    Returns:
        the Secret, to be created with the job as its owner; None if it needs none.
    """
    if not tokens:
        return None
    name = f"{job['metadata']['name']}-tokens-{secrets.token_hex(3)}"  # never the name of an earlier job's
    if tokens.sources:
        for source in _sources(job):
            source.setdefault("secretRef", {"name": name})
    if tokens.trainer:
        entries = [
            {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in sorted(tokens.trainer)
        ]
        trainer = job["spec"].setdefault("trainer", {})
        trainer["env"] = [*(trainer.get("env") or []), *entries]
    values = {**tokens.sources, **tokens.trainer}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": dict(MANAGED_BY), "annotations": dict(job["metadata"]["annotations"])},
        "type": "Opaque",
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in sorted(values.items())},
    }


def create_owned(cluster: Cluster, secret: Manifest, owner: Manifest) -> None:
    """Create a Secret that the cluster deletes with the TrainJob `owner`.

    Raises:
        ApiError: the cluster refuses.
    """
    reference = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }  # fmt: skip
    cluster.create(SECRETS, {**secret, "metadata": {**secret["metadata"], "ownerReferences": [reference]}})
