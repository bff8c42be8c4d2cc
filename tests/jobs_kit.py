"""Small runtimes whose steps are short real programs, for tests of what runs them."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"


def python(code: str) -> list[str]:
    """A command that runs `code`."""
    return ["python", "-c", textwrap.dedent(code)]


def replicated_job(
    name: str, command: list[str], *, after: tuple[str, ...] = (), backoff: int = 0, grace: int | None = None
) -> Manifest:
    """One replicatedJob that fails at once with exit codes 2 and 3."""
    ancestor = {"node": "trainer"}.get(name, name)
    pod: Manifest = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": name,
                "image": "example.com/tiny:1",
                "command": command,
                "volumeMounts": [{"name": "initializer", "mountPath": "/workspace"}],
            }
        ],
    }
    if grace is not None:
        pod["terminationGracePeriodSeconds"] = grace
    rule = {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [2, 3]}}
    job: Manifest = {
        "name": name,
        "replicas": 1,
        "template": {
            "metadata": {"labels": {ANCESTOR: ancestor}},
            "spec": {
                "backoffLimit": backoff,
                "podFailurePolicy": {"rules": [rule]},
                "template": {"spec": pod},
            },
        },
    }
    if after:
        job["dependsOn"] = [{"name": other, "status": "Complete"} for other in after]
    return job


def tiny_runtime(
    node: list[str],
    *,
    model: list[str] | None = None,
    dataset: list[str] | None = None,
    backoff: int = 0,
    grace: int | None = None,
) -> Manifest:
    """A valid ClusterTrainingRuntime with the given commands."""
    jobs = []
    if model is not None:
        jobs.append(replicated_job("model-initializer", model))
    if dataset is not None:
        after = ("model-initializer",) if model is not None else ()
        jobs.append(replicated_job("dataset-initializer", dataset, after=after))
    jobs.append(replicated_job("node", node, after=tuple(j["name"] for j in jobs), backoff=backoff, grace=grace))
    claim = {"metadata": {"name": "initializer"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "tiny", "labels": {"trainer.kubeflow.org/framework": "test"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {"spec": {"volumeClaimPolicies": [{"templates": [claim]}], "replicatedJobs": jobs}},
        },
    }


def tiny_job(name: str = "tiny", *, nodes: int = 1, **spec: Any) -> Manifest:
    """A TrainJob on `tiny_runtime`."""
    trainer = {"numNodes": nodes, "numProcPerNode": 1, **spec.pop("trainer", {})}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "tiny",
            },
            "trainer": trainer,
            **spec,
        },
    }


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What `condition` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
