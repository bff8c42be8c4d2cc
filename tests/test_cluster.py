"""End to end in the cluster that KUBECONFIG names: run by `make test-cluster`, on Kubernetes with Kubeflow Trainer 2.3.

Everything is made in a namespace of its own, which is deleted at the end. The steps of these jobs are small programs in a
plain Python image: no GPU and no image of ours is needed.

Environment: `KUBECONFIG`; `BLUEPRINTS_TEST_IMAGE` (default python:3.11-slim); `BLUEPRINTS_TEST_NAMESPACE` names a namespace
that is there and stays, for clusters where one may not create any; `BLUEPRINTS_TEST_TIMEOUT` is the patience with each job
in seconds (default 300).
"""

from __future__ import annotations

import os
import secrets
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_kit import until

from blueprints.backends.kubernetes import api
from blueprints.backends.kubernetes.api import Cluster, Kind
from blueprints.backends.kubernetes.backend import KubernetesBackend
from blueprints.backends.state import JobStatus
from blueprints.custom_trainer import CustomTrainer, custom_job
from blueprints.errors import ManifestError, UsageError
from blueprints.migrate import migrate_file
from blueprints.recipe import load_recipe, shipped_recipes
from blueprints.runtimes import ANCESTOR, FRAMEWORK, shipped_runtimes
from blueprints.trainjob import runtime_for, train_job

pytestmark = pytest.mark.cluster

Manifest = dict[str, Any]
IMAGE = os.environ.get("BLUEPRINTS_TEST_IMAGE", "python:3.11-slim")
PATIENCE = float(os.environ.get("BLUEPRINTS_TEST_TIMEOUT", "300"))
NAMESPACES = Kind("Namespace", "namespaces", namespaced=False)
NODE = """
    import os, sys
    print("node", os.environ.get("PET_NODE_RANK"), "of", os.environ.get("PET_NNODES"), flush=True)
"""


@dataclass
class Place:
    """The namespace of this run.

    Attributes:
        backend: our backend in it.
        config: the kubeconfig.
    """

    backend: KubernetesBackend
    config: str

    @property
    def cluster(self) -> Cluster:
        return self.backend.cluster

    def runtime(self, name: str, node: str, *, initializer: str = "", **policy: Any) -> Manifest:
        """Install a TrainingRuntime whose steps run Python code."""
        body = runtime(name, node, initializer=initializer, **policy)
        self.cluster.create(api.RUNTIMES, body)
        return body

    def start(self, name: str, on: Manifest, *, nodes: int = 1, **spec: Any) -> str:
        """Submit a TrainJob."""
        job = train_job_of(name, on, nodes=nodes, **spec)
        assert self.backend.start(job, on) == "started"
        return name

    def ended(self, name: str) -> JobStatus:
        """The job when it has ended."""
        self.backend.wait(name, timeout=PATIENCE)
        return self.backend.get(name)  # a watch may tell of the job before it tells of its Pods

    def log(self, name: str, step: str = "node-0") -> str:
        """What a step printed."""
        return "\n".join(line for _, line in self.backend.logs(name, [step]))


def step(name: str, code: str, *, after: str = "", backoff: int = 0) -> Manifest:
    """A replicatedJob that runs Python code, and fails at once with our exit codes for the user's faults."""
    ancestor = "trainer" if name == "node" else name
    container = {
        "name": name, "image": IMAGE, "command": ["python", "-u", "-c", textwrap.dedent(code)],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}, "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "initializer", "mountPath": "/workspace"}],
    }  # fmt: skip
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [2, 3, 4]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]  # fmt: skip
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [container],
        "volumes": [{"name": "initializer", "emptyDir": {}}],
    }  # fmt: skip
    job = {"backoffLimit": backoff, "podFailurePolicy": {"rules": rules}, "template": {"spec": pod}}
    found: Manifest = {
        "name": name,
        "replicas": 1,
        "template": {"metadata": {"labels": {ANCESTOR: ancestor}}, "spec": job},
    }
    return found | ({"dependsOn": [{"name": after, "status": "Complete"}]} if after else {})


def runtime(name: str, node: str, *, initializer: str = "", backoff: int = 0, torch: bool = True) -> Manifest:
    """A TrainingRuntime of Python programs."""
    jobs = [step("dataset-initializer", initializer)] if initializer else []
    jobs.append(step("node", node, after="dataset-initializer" if initializer else "", backoff=backoff))
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {FRAMEWORK: "test"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, **({"torch": {}} if torch else {})},
            "template": {"spec": {"successPolicy": {"operator": "All", "targetReplicatedJobs": ["node"]}, "replicatedJobs": jobs}},
        },
    }  # fmt: skip


def train_job_of(name: str, on: Manifest, *, nodes: int = 1, **spec: Any) -> Manifest:
    """A TrainJob on a runtime."""
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": on["kind"], "name": on["metadata"]["name"]}
    trainer = {"numNodes": nodes, "numProcPerNode": 1, **spec.pop("trainer", {})}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
        "spec": {"runtimeRef": reference, "trainer": trainer, **spec},
    }  # fmt: skip


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A namespace; all that was made in it is gone afterwards."""
    config = os.environ.get("KUBECONFIG")
    if not config:
        pytest.skip(
            "KUBECONFIG is not set: name the kubeconfig of a cluster with Kubeflow Trainer 2.3, see CONTRIBUTING.md"
        )
    given = os.environ.get("BLUEPRINTS_TEST_NAMESPACE")
    name = given or f"blueprints-test-{secrets.token_hex(3)}"
    backend = KubernetesBackend.connect(kubeconfig=config, namespace=name)
    if not given:
        backend.cluster.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield Place(backend, config)
    finally:
        for kind in (api.TRAINJOBS, api.RUNTIMES):
            for item in backend.cluster.find_all(kind):
                backend.cluster.delete(kind, item["metadata"]["name"])
        if not given:
            backend.cluster.delete(NAMESPACES, name)


@pytest.fixture(scope="module")
def plain(place: Place) -> Manifest:
    """A runtime with one node that says who it is."""
    return place.runtime("plain", NODE)


def test_submit_watch_and_logs(place: Place, plain: Manifest) -> None:
    place.start("submit", plain, nodes=2)
    seen: list[str] = []
    for status in place.backend.follow("submit"):
        if status.state not in seen[-1:]:
            seen.append(status.state)
    assert seen[-1] == "Complete"
    assert len(seen) == len(set(seen)), seen  # no state is told twice
    assert [step.status for step in place.backend.get("submit").steps] == ["Succeeded", "Succeeded"]
    for rank in (0, 1):
        assert place.log("submit", f"node-{rank}") == f"node {rank} of 2"
    events = place.backend.events("submit")
    assert events
    assert [event.event_time for event in events] == sorted(event.event_time for event in events)


def test_logs_are_followed(place: Place) -> None:
    slow = place.runtime("talks", "import time\nfor i in range(5): print('line', i, flush=True); time.sleep(1)")
    place.start("talk", slow)
    place.backend.wait("talk", states=["Running"], timeout=PATIENCE)
    assert [line for _, line in place.backend.logs("talk", follow=True)] == [f"line {i}" for i in range(5)]


def test_initializers_run_first(place: Place) -> None:
    staged = place.runtime("staged", NODE, initializer="import os; print('bringing', os.environ['STORAGE_URI'])")
    place.start("staged", staged, initializer={"dataset": {"storageUri": "hf://team/rows"}})
    assert place.ended("staged").state == "Complete"
    assert place.log("staged", "dataset-initializer") == "bringing hf://team/rows"
    assert place.log("staged") == "node 0 of 1"


FAILURES: list[tuple[str, int, int, int]] = [("ours", 2, 3, 1), ("ours", 4, 3, 1), ("another", 7, 1, 2)]


@pytest.mark.parametrize(("kind", "code", "backoff", "attempts"), FAILURES)
def test_failures_with_their_cause(place: Place, kind: str, code: int, backoff: int, attempts: int) -> None:
    said = f'{{"problem": "the {kind} problem", "todo": "do better", "exit_code": {code}}}'
    node = f"import sys\nopen('/dev/termination-log', 'w').write({said!r})\nprint('dying')\nsys.exit({code})"
    name = f"fails-{code}"
    place.start(name, place.runtime(name, node, backoff=backoff))
    status = place.ended(name)
    assert status.state == "Failed"
    assert f"the {kind} problem" in status.message
    assert status.todo == "do better"
    assert status.steps[0].exit_code == code
    assert status.exit_code == (code if code == 2 else 4)
    assert place.log(name).splitlines().count("dying") == attempts


def test_an_image_that_is_not_there_is_told(place: Place, plain: Manifest) -> None:
    place.start("no-image", plain, trainer={"image": "registry.invalid/nothing:1"})
    status = until(lambda: (s := place.backend.get("no-image")).message and s, PATIENCE)
    assert status.state != "Failed"
    assert "registry.invalid/nothing:1" in status.message
    place.backend.delete("no-image", force=True)


def test_suspend_and_resume(place: Place) -> None:
    waits = place.runtime("waits", "import time; print('going', flush=True); time.sleep(20)")
    place.start("pause", waits)
    place.backend.wait("pause", states=["Running"], timeout=PATIENCE)
    place.backend.suspend("pause")
    until(lambda: place.backend.get("pause").state == "Suspended", PATIENCE)
    until(lambda: not place.cluster.find_all(api.PODS, labels="jobset.sigs.k8s.io/jobset-name=pause"), PATIENCE)
    place.backend.resume("pause")
    assert place.ended("pause").state == "Complete"


def test_a_job_that_starts_suspended(place: Place, plain: Manifest) -> None:
    place.start("later", plain, suspend=True)
    until(lambda: place.backend.get("later").state == "Suspended", PATIENCE)
    place.backend.resume("later")
    assert place.ended("later").state == "Complete"


def test_a_deadline(place: Place) -> None:
    place.start("deadline", place.runtime("sleeps", "import time; time.sleep(600)"), activeDeadlineSeconds=5)
    status = place.ended("deadline")
    assert (status.state, status.reason) == ("Failed", "DeadlineExceeded")


def test_delete_leaves_nothing(place: Place) -> None:
    place.start("gone", place.runtime("runs-long", "import time; time.sleep(600)"))
    place.backend.wait("gone", states=["Running"], timeout=PATIENCE)
    with pytest.raises(UsageError, match="has not ended"):
        place.backend.delete("gone")
    place.backend.delete("gone", force=True)

    def left() -> list[str]:
        kinds = (api.JOBSETS, api.JOBS, api.PODS)
        labels = "jobset.sigs.k8s.io/jobset-name=gone"
        return [item["metadata"]["name"] for kind in kinds for item in place.cluster.find_all(kind, labels=labels)]

    until(lambda: not left() and place.cluster.find(api.TRAINJOBS, "gone") is None, PATIENCE)


def test_what_cannot_work_is_refused_before_it_is_sent(place: Place, plain: Manifest) -> None:
    with pytest.raises(ManifestError, match="at most 48 characters"):
        place.backend.start(train_job_of("n" * 49, plain), plain)
    assert place.cluster.find(api.TRAINJOBS, "n" * 49) is None


def test_the_same_name_with_another_job_is_refused(place: Place, plain: Manifest) -> None:
    place.start("taken", plain)
    with pytest.raises(UsageError, match="exists"):
        place.backend.start(train_job_of("taken", plain, nodes=2), plain)


def announce(word: str) -> None:
    import os

    print(word, os.environ["JOB_COMPLETION_INDEX"], flush=True)


def refuse() -> None:
    raise ValueError("nothing will come of this")


def test_functions_of_ones_own(place: Place) -> None:
    direct = place.runtime("direct", NODE, torch=False)
    job = custom_job(
        CustomTrainer(func=announce, func_args={"word": "hello $(HOME) `x`"}, num_nodes=2), direct, name="fn"
    )
    place.backend.start(job, direct)
    assert place.ended("fn").state == "Complete"
    assert place.log("fn", "node-1") == "hello $(HOME) `x` 1"
    place.backend.start(custom_job(CustomTrainer(func=refuse), direct, name="fn-bad"), direct)
    status = place.ended("fn-bad")
    assert "ValueError: nothing will come of this" in status.message


def test_a_migrated_job(place: Place, tmp_path: Path) -> None:
    shown = {
        "name": "pytorch",
        "image": IMAGE,
        "command": ["sh", "-c", "echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR"],
    }
    specs = {
        role: {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [shown]}}}
        for role in ("Master", "Worker")
    }
    metadata = {"name": "old", "namespace": place.cluster.namespace}
    old = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {"pytorchReplicaSpecs": specs},
    }
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old))
    (migrated,) = migrate_file(str(tmp_path / "old.yaml"))
    place.cluster.create(api.RUNTIMES, migrated.runtime)
    place.backend.start(migrated.job, migrated.runtime)
    assert place.ended("old").state == "Complete"
    assert place.log("old", "node-1") == "rank 1 of 2 at old-node-0-0.old"


@pytest.fixture(scope="module")
def shipped(place: Place) -> Iterator[None]:
    """The shipped runtimes, installed where they are not and removed again."""
    made = []
    for name, item in shipped_runtimes().items():
        if place.cluster.find(api.CLUSTER_RUNTIMES, name) is None:
            place.cluster.create(api.CLUSTER_RUNTIMES, item)
            made.append(name)
    yield
    for name in made:
        place.cluster.delete(api.CLUSTER_RUNTIMES, name)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("recipe", [shipped.name for shipped in shipped_recipes()])
def test_the_cluster_takes_every_recipe(place: Place, recipe: str) -> None:
    loaded = load_recipe(recipe, environ={})
    on = runtime_for(loaded.recipe)
    body = train_job(loaded, on)
    place.cluster.create(api.TRAINJOBS, body, dry_run=True)  # the webhooks' word, nothing is started


@pytest.fixture
def sdk(place: Place, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The official SDK in the same namespace."""
    monkeypatch.setenv("KUBECONFIG", place.config)
    from kubeflow.common.types import KubernetesBackendConfig
    from kubeflow.trainer import TrainerClient

    return TrainerClient(KubernetesBackendConfig(config_file=place.config, namespace=place.cluster.namespace))


@pytest.mark.usefixtures("shipped")
def test_the_official_sdk_sees_runtimes_and_jobs(place: Place, plain: Manifest, sdk: Any) -> None:
    assert set(shipped_runtimes()) <= {item.name for item in sdk.list_runtimes()}
    place.start("seen", plain)
    place.ended("seen")
    assert sdk.wait_for_job_status("seen", timeout=60).status == "Complete"
    assert [step.name for step in sdk.get_job("seen").steps] == ["node-0"]
    assert list(sdk.get_job_logs("seen")) == ["node 0 of 1"]


@pytest.mark.usefixtures("plain")
def test_the_official_sdk_creates_jobs(place: Place, sdk: Any) -> None:
    from kubeflow.trainer import CustomTrainerContainer
    from kubeflow.trainer.options import Name, TrainerCommand

    sdk.train(
        runtime="plain", trainer=CustomTrainerContainer(image=IMAGE, num_nodes=2),
        options=[Name("by-sdk"), TrainerCommand(["python", "-c", "print('by the SDK')"])],
    )  # fmt: skip
    assert place.ended("by-sdk").state == "Complete"
    assert place.log("by-sdk", "node-1") == "by the SDK"
    sdk.delete_job("by-sdk")
    until(lambda: place.cluster.find(api.TRAINJOBS, "by-sdk") is None, PATIENCE)
