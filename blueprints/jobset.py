"""From a TrainJob and its runtime to the objects the control plane creates, by its own rules.

`build_objects` follows the order of Kubeflow Trainer 2.3: runtime patches, the count of every PodSet, resources, the ML
policy (torch, mpi, jax, xgboost or none), the PodGroup policy, parallelism, then the builder that puts the TrainJob's
initializers and trainer into the containers. Not built: Secrets (the SSH key of an MPI job is made by the controller) and
the copy of the runtime that it keeps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blueprints import torchtune
from blueprints.errors import UsageError
from blueprints.quantity import exact, total, whole
from blueprints.runtimes import TRAINER_CONTAINER, Manifest, ancestor_of

MASTER_PORT = 29500
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
LAUNCHER = "launcher"
POLICIES = ("torch", "mpi", "jax", "xgboost", "flux")
RESERVED_ENV: dict[str, tuple[str, ...]] = {
    "torch": ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "mpi": (
        "OMPI_MCA_orte_default_hostfile", "OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_keep_fqdn_hostnames",
        "OMPI_MCA_orte_set_default_slots",
    ),
    "xgboost": ("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER"),
}  # fmt: skip
"""Variables of the trainer that the control plane sets, by ML policy; a TrainJob may not."""
GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
QUEUE_ANNOTATION = "scheduling.volcano.sh/queue-name"
_INDEX = {"valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}}
_MERGE_KEYS = {
    "replicatedJobs": "name",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "env": "name",
    "claims": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
}
"""Lists that Kubernetes' strategic merge patch merges entry by entry, and the key it finds the entry by."""


def build_job_set(job: Manifest, runtime: Manifest) -> Manifest:
    """The JobSet that the control plane creates for `job` on `runtime`; see `build_objects`."""
    return build_objects(job, runtime)[0]


def build_objects(job: Manifest, runtime: Manifest) -> list[Manifest]:
    """The JobSet that the control plane creates for `job` on `runtime`, then a PodGroup and a hostfile's ConfigMap
    where the runtime's policies ask for one.

    Args:
        job: a TrainJob.
        runtime: a ClusterTrainingRuntime or TrainingRuntime. Neither argument is changed.

    Raises:
        UsageError: the runtime has the flux policy, which is not resolved here.
    """
    build = _Build.of(job, runtime)
    build.enforce_ml_policy()
    groups = build.pod_groups()  # from the resources before the builder, as the control plane sums them
    build.enforce_pod_groups()
    build.sync_parallelism()
    build.put_initializers()
    build.put_trainer()
    return [build.job_set(), *groups, *build.hostfile()]


def node_count(job: Manifest, runtime: Manifest) -> int:
    """Nodes of the trainer: the job's, else the runtime's, else 1."""
    trainer = (job.get("spec") or {}).get("trainer") or {}
    policy = (runtime.get("spec") or {}).get("mlPolicy") or {}
    nodes = trainer.get("numNodes")
    return int(policy.get("numNodes", 1) if nodes is None else nodes)


@dataclass
class _Build:
    """One TrainJob on its way to a JobSet; the methods are the control plane's phases.

    Attributes:
        name, spec: the TrainJob's.
        policy: the runtime's mlPolicy, None without one.
        template: the JobSet's spec, patches merged.
        counts: Pods of each replicatedJob, by name.
    """

    name: str
    namespace: str | None
    spec: Manifest
    policy: Manifest | None
    groups: Manifest
    labels: dict[str, str]
    annotations: dict[str, str]
    template: Manifest
    counts: dict[str, int]

    @classmethod
    def of(cls, job: Manifest, runtime: Manifest) -> _Build:
        """Merge the patches and count the Pods."""
        spec = copy.deepcopy(job.get("spec") or {})
        source = copy.deepcopy(runtime["spec"]["template"])
        metadata, template = source.get("metadata") or {}, source["spec"]
        labels, annotations = dict(metadata.get("labels") or {}), dict(metadata.get("annotations") or {})
        for patch in spec.get("runtimePatches") or []:
            change = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
            labels |= (change.get("metadata") or {}).get("labels") or {}
            annotations |= (change.get("metadata") or {}).get("annotations") or {}
            template = strategic_merge(template, change.get("spec") or {})
        policy = runtime["spec"].get("mlPolicy")
        counts = {}
        for replicated in template["replicatedJobs"]:
            job_spec = replicated["template"].setdefault("spec", {})
            count = job_spec.get("parallelism")
            if ancestor_of(replicated) == "trainer" and policy is not None:
                count = policy.get("numNodes")
            counts[replicated["name"]] = max(1 if count is None else int(count), 1)
        groups, namespace = runtime["spec"].get("podGroupPolicy") or {}, job["metadata"].get("namespace")
        name = job["metadata"]["name"]
        return cls(name, namespace, spec, policy, groups, labels, annotations, template, counts)

    @property
    def trainer(self) -> Manifest | None:
        trainer: Manifest | None = self.spec.get("trainer")
        return trainer

    @property
    def kind(self) -> str | None:
        """The ML policy in force, None for plain nodes."""
        return next((kind for kind in POLICIES if self.policy and self.policy.get(kind) is not None), None)

    @property
    def mpi(self) -> Manifest:
        """The MPI policy with the defaults of the custom resource."""
        given = (self.policy or {}).get("mpi") or {}
        defaults = {"numProcPerNode": 1, "sshAuthMountPath": "/root/.ssh", "runLauncherAsNode": False}
        return defaults | {key: value for key, value in given.items() if value is not None}

    @property
    def launcher_is_node(self) -> bool:
        return self.kind == "mpi" and bool(self.mpi["runLauncherAsNode"])

    def jobs(self) -> Iterator[Manifest]:
        """The replicatedJobs, in the runtime's order."""
        yield from self.template["replicatedJobs"]

    def trainer_job(self) -> Manifest | None:
        """The first replicatedJob labelled as the trainer."""
        return next((replicated for replicated in self.jobs() if ancestor_of(replicated) == "trainer"), None)

    def enforce_ml_policy(self) -> None:
        """Node count, resources and the variables of the policy.

        Raises:
            UsageError: the policy is flux.
        """
        if self.kind == "flux":
            raise UsageError(
                "the ML policy flux is not resolved here", where="spec.mlPolicy.flux",
                todo="look at the JobSet that the cluster makes: kubectl get jobset NAME -o yaml",
            )  # fmt: skip
        if self.policy is not None:
            self._merge_resources()
        if self.kind == "mpi":
            self._enforce_mpi()
            return
        trainer_job = self.trainer_job()
        if trainer_job is None:
            return
        if self.trainer and self.trainer.get("numNodes") is not None:
            self.counts[trainer_job["name"]] = int(self.trainer["numNodes"])
        variables = {"torch": self._torch_env, "jax": self._jax_env, "xgboost": self._xgboost_env}.get(self.kind or "")
        container = _container(trainer_job, TRAINER_CONTAINER)
        if variables is None or container is None or self.trainer is None:
            return  # without spec.trainer the control plane injects nothing at all, PET_* included
        if self.kind == "torch":
            upsert(container.setdefault("env", []), self.trainer.get("env") or [], "name")
        upsert(container.setdefault("env", []), variables(self.counts[trainer_job["name"]]), "name")
        upsert(container.setdefault("ports", []), [{"containerPort": MASTER_PORT}], "containerPort")
        if self.kind == "torch":
            self._rewrite_torchtune(container)
            self._inject_elsewhere(self.counts[trainer_job["name"]])

    def _merge_resources(self) -> None:
        wanted = (self.trainer or {}).get("resourcesPerNode")
        if wanted is None:
            return
        for replicated in self.jobs():
            as_node = self.launcher_is_node and replicated["name"] == TRAINER_CONTAINER
            container = _container(replicated, TRAINER_CONTAINER)
            if container is not None and (ancestor_of(replicated) == "trainer" or as_node):
                merged = strategic_merge(container.get("resources") or {}, wanted)
                # The control plane applies limits and requests alone.
                container["resources"] = {key: merged[key] for key in ("limits", "requests") if merged.get(key)}

    def _resources(self) -> Manifest:
        """What counts of devices are read from: the job's own resources if it has any, hiding the runtime's."""
        own = (self.trainer or {}).get("resourcesPerNode")
        if own is not None:
            return dict(own)
        for replicated in self.jobs():
            container = _container(replicated, TRAINER_CONTAINER)
            is_node = replicated["name"] == TRAINER_CONTAINER or ancestor_of(replicated) == "trainer"
            if is_node and container is not None and container.get("resources") is not None:
                return dict(container["resources"])
        return {}

    def _processes(self) -> int | None:
        """Processes per node under torch; None: `auto`, one per GPU."""
        given = (self.trainer or {}).get("numProcPerNode")
        if given is not None:
            return int(given)
        resources = self._resources()
        if gpus_of(resources):
            return None
        requested = whole((resources.get("requests") or {}).get("cpu") or 0)
        return max(1, requested or whole((resources.get("limits") or {}).get("cpu") or 0))

    def _address(self) -> str:
        return f"{self.name}-{TRAINER_CONTAINER}-0-0.{self.name}"

    def _torch_env(self, nodes: int) -> list[Manifest]:
        assert self.trainer is not None
        master = [] if torchtune.applies(self.trainer) else self._torch_master()
        return [*self._torch_ranks(nodes), *master]

    def _torch_ranks(self, nodes: int) -> list[Manifest]:
        processes = self._processes()
        return [
            {"name": "PET_NNODES", "value": str(nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": "auto" if processes is None else str(processes)},
            {"name": "PET_NODE_RANK", **_INDEX},
        ]

    def _torch_master(self) -> list[Manifest]:
        return [
            {"name": "PET_MASTER_ADDR", "value": self._address()},
            {"name": "PET_MASTER_PORT", "value": str(MASTER_PORT)},
        ]

    def _jax_env(self, nodes: int) -> list[Manifest]:
        return [
            {"name": "JAX_NUM_PROCESSES", "value": str(nodes)},
            {"name": "JAX_PROCESS_ID", **_INDEX},
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{self._address()}:{MASTER_PORT}"},
        ]

    def _xgboost_env(self, nodes: int) -> list[Manifest]:
        workers = nodes * (gpus_of(self._resources()) or 1)
        return [
            {"name": "DMLC_TRACKER_URI", "value": self._address()},
            {"name": "DMLC_TRACKER_PORT", "value": str(MASTER_PORT)},
            {"name": "DMLC_TASK_ID", **_INDEX},
            {"name": "DMLC_NUM_WORKER", "value": str(workers)},
        ]

    def _rewrite_torchtune(self, container: Manifest) -> None:
        assert self.trainer is not None
        if torchtune.applies(self.trainer):
            nodes, processes, gpus = self._torchtune_counts()
            self.trainer["command"] = torchtune.command(
                self.trainer, self.spec["runtimeRef"]["name"], container.get("command") or [], nodes=nodes,
                processes=processes, gpus=gpus, endpoint=f"{self._address()}:{MASTER_PORT}",
            )  # fmt: skip

    def _torchtune_counts(self) -> tuple[int, int | None, int]:
        trainer_job = self.trainer_job()
        assert trainer_job is not None
        return self.counts[trainer_job["name"]], self._processes(), gpus_of(self._resources())

    def _inject_elsewhere(self, nodes: int) -> None:
        """torch.envInjection: the variables for further containers and init containers."""
        injection = ((self.policy or {}).get("torch") or {}).get("envInjection") or {}
        for target in injection.get("targets") or []:
            replicated = next((entry for entry in self.jobs() if entry["name"] == target.get("jobName")), None)
            for name in target.get("containerNames") or []:
                container = None if replicated is None else _container(replicated, name, init=True)
                if container is not None:
                    env = [*self._torch_ranks(nodes), *self._torch_master()]
                    upsert(container.setdefault("env", []), env, "name")

    def _enforce_mpi(self) -> None:
        nodes = (self.trainer or {}).get("numNodes")
        if nodes is not None and TRAINER_CONTAINER in self.counts:
            # The launcher is one of the nodes where it trains too.
            self.counts[TRAINER_CONTAINER] = max(int(nodes) - 1, 1) if self.launcher_is_node else int(nodes)
        for replicated in self.jobs():
            if replicated["name"] in (TRAINER_CONTAINER, LAUNCHER):
                self._put_mpi(replicated)

    def _put_mpi(self, replicated: Manifest) -> None:
        is_launcher = replicated["name"] == LAUNCHER
        volumes, mounts = [_ssh_volume(self.name)], [("mpi-ssh-auth", str(self.mpi["sshAuthMountPath"]))]
        if is_launcher:
            volumes.append(_hostfile_volume(self.name))
            mounts.append(("mpi-hostfile", "/etc/mpi"))
        upsert(_pod(replicated).setdefault("volumes", []), volumes, "name")
        container = _container(replicated, TRAINER_CONTAINER)
        if container is None:
            return
        entries = [{"name": name, "mountPath": path} for name, path in mounts]
        upsert(container.setdefault("volumeMounts", []), entries, "mountPath")
        if is_launcher:
            upsert(container.setdefault("env", []), self._mpi_env(), "name")

    def _slots(self) -> int:
        given = (self.trainer or {}).get("numProcPerNode")
        if given is not None:
            return int(given)
        slots = int(self.mpi["numProcPerNode"])
        gpus = gpus_of(self._resources())
        return gpus if slots == 1 and gpus > 1 else slots

    def _mpi_env(self) -> list[Manifest]:
        return [
            {"name": "OMPI_MCA_orte_default_hostfile", "value": "/etc/mpi/hostfile"},
            {"name": "OMPI_MCA_orte_keep_fqdn_hostnames", "value": "true"},
            {"name": "OMPI_MCA_orte_set_default_slots", "value": str(self._slots())},
            {"name": "OMPI_MCA_plm_rsh_args", "value": "-o ConnectionAttempts=10"},
        ]

    def hostfile(self) -> Iterator[Manifest]:
        """The ConfigMap with the hosts of an MPI job."""
        if self.kind != "mpi":
            return
        hosts = [TRAINER_CONTAINER, *([LAUNCHER] if self.launcher_is_node else [])]
        domain = (self.template.get("network") or {}).get("subdomain") or self.name
        lines = [
            f"{self.name}-{entry['name']}-{replica}-{index}.{domain} slots={self._slots()}\n"
            for entry in self.jobs()
            if entry["name"] in hosts
            for replica in range(int(entry.get("replicas") or 1))
            for index in range(self.counts[entry["name"]])
        ]
        metadata = self._metadata(f"{self.name}-mpi-hostfile")
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"hostfile": "".join(lines)}}

    def enforce_pod_groups(self) -> None:
        """The label or annotation by which a gang scheduler knows the Pods."""
        for policy, place, key in (
            ("coscheduling", "labels", GROUP_LABEL),
            ("volcano", "annotations", GROUP_ANNOTATION),
        ):
            if self.groups.get(policy) is None:
                continue
            for replicated in self.jobs():
                metadata = replicated["template"]["spec"].setdefault("template", {}).setdefault("metadata", {})
                metadata[place] = {**(metadata.get(place) or {}), key: self.name}

    def pod_groups(self) -> list[Manifest]:
        """The PodGroup: all Pods at once, initializers included, with the sum of their requests."""
        minimum: Manifest = {"minMember": sum(self.counts.values()), "minResources": self._requests()}
        groups: list[Manifest] = []
        if (coscheduling := self.groups.get("coscheduling")) is not None:
            timeout = coscheduling.get("scheduleTimeoutSeconds")
            spec = minimum | {"scheduleTimeoutSeconds": 60 if timeout is None else timeout}
            groups.append(self._pod_group("scheduling.x-k8s.io/v1alpha1", spec))
        if (volcano := self.groups.get("volcano")) is not None:
            spec = minimum | self._volcano(volcano)
            groups.append(self._pod_group("scheduling.volcano.sh/v1beta1", spec))
        return groups

    def _volcano(self, policy: Manifest) -> Manifest:
        spec: Manifest = {}
        if QUEUE_ANNOTATION in self.annotations:
            spec["queue"] = self.annotations[QUEUE_ANNOTATION]
        for replicated in self.jobs():
            if _pod(replicated).get("priorityClassName") is not None:
                spec["priorityClassName"] = _pod(replicated)["priorityClassName"]
        if (topology := policy.get("networkTopology")) is not None:
            spec["networkTopology"] = {"mode": "hard", "highestTierAllowed": 1} | topology
        return spec

    def _pod_group(self, version: str, spec: Manifest) -> Manifest:
        return {"apiVersion": version, "kind": "PodGroup", "metadata": self._metadata(self.name), "spec": spec}

    def _requests(self) -> dict[str, str]:
        """Requests of all Pods. Limits do not count here: the API server makes requests of them only in Pods."""
        found: dict[str, list[object]] = {}
        for replicated in self.jobs():
            for name, amount in pod_requests(_pod(replicated)).items():
                found.setdefault(name, []).extend([amount] * self.counts[replicated["name"]])
        return {name: total(amounts) for name, amounts in found.items()}

    def sync_parallelism(self) -> None:
        """Pods of each replicatedJob."""
        for replicated in self.jobs():
            job_spec = replicated["template"]["spec"]
            job_spec["parallelism"] = job_spec["completions"] = self.counts[replicated["name"]]
            replicated.setdefault("replicas", 1)

    def put_initializers(self) -> None:
        """`spec.initializer` into the containers of the initializers."""
        for replicated in self.jobs():
            ancestor = ancestor_of(replicated)
            if ancestor not in ("dataset-initializer", "model-initializer"):
                continue
            replicated["replicas"] = 1
            config = (self.spec.get("initializer") or {}).get(ancestor.removesuffix("-initializer"))
            container = _container(replicated, ancestor)
            if config is not None and container is not None:  # else it runs with the runtime's own environment
                _put_initializer(container, config)

    def put_trainer(self) -> None:
        """`spec.trainer` into the trainer's container; its variables win over those of jax, xgboost and mpi."""
        for replicated in self.jobs():
            container = _container(replicated, TRAINER_CONTAINER)
            is_trainer = ancestor_of(replicated) == "trainer"
            if is_trainer:
                replicated["replicas"] = 1
            if container is None or self.trainer is None:
                continue
            if is_trainer:
                for key in ("image", "command", "args"):
                    if self.trainer.get(key) is not None:
                        container[key] = self.trainer[key]
            as_node = self.launcher_is_node and replicated["name"] == TRAINER_CONTAINER
            if (is_trainer or as_node) and self.trainer.get("env"):
                upsert(container.setdefault("env", []), self.trainer["env"], "name")

    def _metadata(self, name: str) -> Manifest:
        return {"name": name, **({"namespace": self.namespace} if self.namespace else {})}

    def job_set(self) -> Manifest:
        """The finished JobSet."""
        metadata = self._metadata(self.name)
        if self.labels:
            metadata["labels"] = self.labels
        if self.annotations:
            metadata["annotations"] = self.annotations
        self.template["suspend"] = bool(self.spec.get("suspend", False))
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": self.template,
        }  # fmt: skip


def _put_initializer(container: Manifest, config: Manifest) -> None:
    env: list[Manifest] = []
    if config.get("storageUri") is not None:
        env.append({"name": "STORAGE_URI", "value": config["storageUri"]})
    upsert(container.setdefault("env", []), [*env, *(config.get("env") or [])], "name")
    if config.get("secretRef"):
        container.setdefault("envFrom", []).append({"secretRef": {"name": config["secretRef"]["name"]}})


def _ssh_volume(job: str) -> Manifest:
    items = [
        {"key": "ssh-privatekey", "path": "id_rsa", "mode": 0o640},
        {"key": "ssh-publickey", "path": "id_rsa.pub", "mode": 0o644},
        {"key": "ssh-publickey", "path": "authorized_keys", "mode": 0o644},
    ]
    secret = {"secretName": f"{job}-mpi-ssh-auth", "defaultMode": 0o400, "items": items}
    return {"name": "mpi-ssh-auth", "secret": secret}


def _hostfile_volume(job: str) -> Manifest:
    items = [{"key": "hostfile", "path": "hostfile", "mode": 0o444}]
    return {"name": "mpi-hostfile", "configMap": {"name": f"{job}-mpi-hostfile", "items": items}}


def gpus_of(resources: Manifest) -> int:
    """GPUs of a container as the control plane counts them: the first resource with "gpu" in its name, of the requests,
    else of the limits."""
    for kind in ("requests", "limits"):
        for resource, amount in (resources.get(kind) or {}).items():
            if "gpu" in resource.lower():
                if count := whole(amount):
                    return count
                break
    return 0


def pod_requests(pod: Manifest) -> dict[str, object]:
    """What one Pod asks for: its containers' sum, or more where an init container needs more; sidecars and overhead
    added. Limits are not looked at."""
    needed: dict[str, list[object]] = {}
    sidecars: dict[str, list[object]] = {}
    highest: dict[str, str] = {}
    for container in pod.get("initContainers") or []:
        requests = (container.get("resources") or {}).get("requests") or {}
        if container.get("restartPolicy") == "Always":
            for name, amount in requests.items():
                sidecars.setdefault(name, []).append(amount)
                needed.setdefault(name, []).append(amount)
            requests = {}
        for name in {*requests, *sidecars}:
            at_once = total([*([requests[name]] if name in requests else []), *sidecars.get(name, [])])
            if name not in highest or exact(at_once) > exact(highest[name]):
                highest[name] = at_once
    for container in pod.get("containers") or []:
        for name, amount in ((container.get("resources") or {}).get("requests") or {}).items():
            needed.setdefault(name, []).append(amount)
    found: dict[str, object] = {name: total(amounts) for name, amounts in needed.items()}
    for name, amount in highest.items():
        if name not in found or exact(amount) > exact(found[name]):
            found[name] = amount
    for name, amount in (pod.get("overhead") or {}).items():
        found[name] = total([found[name], amount]) if name in found else amount
    return found


def upsert(target: list[Manifest], entries: list[Manifest], key: str) -> None:
    """Replace the entries of the same key, append the new ones."""
    places = {entry.get(key): place for place, entry in enumerate(target)}
    for entry in entries:
        if entry.get(key) in places:
            target[places[entry.get(key)]] = entry
        else:
            places[entry.get(key)] = len(target)
            target.append(entry)


def strategic_merge(base: Any, patch: Any, name: str = "") -> Any:
    """Kubernetes' strategic merge patch: maps merge by key, known lists by their merge key, the rest is replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = strategic_merge(merged.get(key), value, key)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and name in _MERGE_KEYS:
        key = _MERGE_KEYS[name]
        merged_list = list(base)
        for entry in patch:
            place = next((i for i, old in enumerate(merged_list) if old.get(key) == entry.get(key)), None)
            if place is None:
                merged_list.append(copy.deepcopy(entry))
            else:
                merged_list[place] = strategic_merge(merged_list[place], entry)
        return merged_list
    return copy.deepcopy(patch)


def _container(replicated: Manifest, name: str, *, init: bool = False) -> Manifest | None:
    """The container `name` of a replicatedJob's Pod; with `init` an init container too."""
    pod = _pod(replicated)
    entries = [*(pod.get("containers") or []), *((pod.get("initContainers") or []) if init else [])]
    return next((entry for entry in entries if entry.get("name") == name), None)


def _pod(replicated: Manifest) -> Manifest:
    pod: Manifest = replicated["template"].setdefault("spec", {}).setdefault("template", {}).setdefault("spec", {})
    return pod
