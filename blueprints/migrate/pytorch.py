"""PyTorchJobs: one replicatedJob `node`, rank 0 is what was the Master."""

from __future__ import annotations

import copy
import re

from blueprints.errors import UsageError
from blueprints.jobset import gpus_of
from blueprints.migrate.launch import Launch, launch_of, old_variables, refers_to_old_variables
from blueprints.migrate.parts import Parts, count_of, gang, replicas_of
from blueprints.migrate.pods import Tell, differences, label_trainer, main_container, replicated_job
from blueprints.quantity import whole
from blueprints.runtimes import TRAINER_CONTAINER, Manifest

MAIN = "pytorch"
SPECS = "spec.pytorchReplicaSpecs"
_MOST = 128
"""Items of a list in a TrainJob; longer ones stay in the runtime."""
_SHOWN = 60


def from_pytorch_job(old: Manifest, tell: Tell) -> Parts:
    """Take a PyTorchJob apart.

    Raises:
        UsageError: it has neither Master nor Worker, or replicas of another name.
    """
    spec = old["spec"]
    policy = dict(spec.get("runPolicy") or {})
    specs = spec["pytorchReplicaSpecs"]
    found = replicas_of(specs, ("Master", "Worker"))
    unknown = [str(key) for key in specs if str(key).lower() not in ("master", "worker")]
    if unknown or not found:
        problem = f"has replicas {', '.join(unknown)}" if unknown else "has no replicas"
        raise UsageError(
            f"PyTorchJob {old['metadata'].get('name')} {problem}", where=SPECS, todo="use Master and Worker"
        )
    written, first = next(iter(found.values()))
    key = f"{SPECS}.{written}"
    main = main_container(first["template"]["spec"], MAIN, key)
    nodes = sum(count_of(replica, f"{SPECS}.{name}") for name, replica in found.values())
    _compare(found, tell)
    secret = f"{re.sub(r'[^a-z0-9-]+', '-', str(old['metadata'].get('name') or 'job').lower())}-env"
    node = replicated_job(TRAINER_CONTAINER, first, main=main, policy=policy, secret=secret, key=key, tell=tell)
    label_trainer(node)
    pod = node["template"]["spec"]["template"]["spec"]
    container = next(entry for entry in pod["containers"] if entry["name"] == TRAINER_CONTAINER)
    groups, annotations = gang(policy, [pod], nodes, tell)
    _elastic(spec.get("elasticPolicy"), nodes, tell)
    trainer = _Trainer(old, container, nodes, f"{key}.template.spec.containers[{main}]", tell)
    place = "spec.template.spec.replicatedJobs[node]"
    return Parts(
        framework="torch",
        nodes=nodes,
        policy={"numNodes": nodes, "torch": {}},
        job_set={
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [TRAINER_CONTAINER]},
            "replicatedJobs": [node],
        },
        trainer=trainer.of,
        run_policy=policy,
        pod_groups=groups,
        annotations=annotations,
        origins={
            "spec.mlPolicy.numNodes": f"{key}.replicas",
            "spec.trainer.resourcesPerNode": f"{key}.template.spec.containers[{main}].resources",
            "spec.trainer.numNodes": f"{key}.replicas",
            "spec.trainer": f"{key}.template.spec.containers[{main}]",
            place: f"{key}.template.spec",
            "replicatedJobs[node]": f"{key}.template.spec",
        },
    )


def _compare(found: dict[str, tuple[str, Manifest]], tell: Tell) -> None:
    """Nodes of a TrainJob are alike: tell in what the Workers were not like the Master."""
    if len(found) < 2:
        return
    (_, master), (written, worker) = found["Master"], found["Worker"]
    for name in ("restartPolicy", "template"):
        left, right = ({name: replica.get(name)} for replica in (master, worker))
        for place, mine, theirs in differences(left, right):
            shown = "differ" if ".env[" in place else f"{_short(theirs)} became {_short(mine)}"
            tell(
                f"{SPECS}.{written}.{place}",
                f"{shown}: all nodes are as the Master was, a TrainJob has one kind of node",
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _elastic(policy: Manifest | None, nodes: int, tell: Tell) -> None:
    if policy is None:
        return
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    span = (
        f"between {least} and {most} nodes" if least is not None or most is not None else "a changing number of nodes"
    )
    tell(
        "spec.elasticPolicy", f"was not carried over: Trainer has no elastic jobs. Instead of {span} there are {nodes}"
    )
    if policy.get("maxRestarts") is not None:
        text = f"{policy['maxRestarts']} was dropped: Pods are retried by their Job (backoffLimit), not within torchrun"
        tell("spec.elasticPolicy.maxRestarts", text)


class _Trainer:
    """`spec.trainer` of the TrainJob; takes out of the container what belongs there."""

    def __init__(self, old: Manifest, container: Manifest, nodes: int, key: str, tell: Tell) -> None:
        self.old, self.container, self.nodes, self.key, self.tell = old, container, nodes, key, tell
        elastic = (old["spec"].get("elasticPolicy") or {}).get("nProcPerNode")
        self.given = old["spec"].get("nprocPerNode") if elastic is None else elastic
        if not (self.given is None or str(self.given) in ("auto", "cpu", "gpu") or str(self.given).isdecimal()):
            raise UsageError(
                f"{self.given!r} is not valid", where="spec.nprocPerNode", todo="use auto, cpu, gpu or a number"
            )
        self.counted = int(self.given) if str(self.given).isdecimal() else 1

    def of(self, name: str) -> Manifest:
        """The trainer of the TrainJob of this name."""
        launch = launch_of(self.container.pop("command", None), self.container.pop("args", None), self.counted)
        if launch.remark:
            self.tell(f"{self.key}.command", launch.remark)
        resources = self._resources()
        trainer: Manifest = {"numNodes": self.nodes}
        processes = self._processes(launch, resources)
        if processes is not None:
            trainer["numProcPerNode"] = processes
        env = self._env(launch, name)
        for field, words in (("command", launch.command), ("args", launch.args)):
            if words is not None:
                home = trainer if len(words) <= _MOST else self.container
                home[field] = [self._new_hosts(word, name, field) for word in words]
        self.container.pop("env", None)
        if env:
            home = trainer if len(env) <= _MOST else self.container
            home["env"] = [self._new_value(entry, name) for entry in env]
        if resources:
            trainer["resourcesPerNode"] = resources
        order = ("command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode")
        return {key: trainer[key] for key in order if key in trainer}

    def _resources(self) -> Manifest:
        """Limits and requests; what else there is (claims) stays in the runtime."""
        given = self.container.pop("resources", None) or {}
        claims = {key: value for key, value in given.items() if key not in ("limits", "requests")}
        if claims:
            self.container["resources"] = claims
        return {key: given[key] for key in ("limits", "requests") if given.get(key)}

    def _processes(self, launch: Launch, resources: Manifest) -> int | None:
        """Processes per node; None: as many as there are GPUs, or CPUs asked for."""
        given = str(self.given or "auto")
        if given.isdecimal():
            return max(1, int(given))
        if launch.remark or not launch.by_torchrun:
            return 1
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        gpus, cpus = gpus_of(resources), whole(amounts.get("cpu") or 0)
        devices = [name for name in amounts if "/" in name and "gpu" not in name.lower()]
        if given == "gpu" or gpus:
            return gpus or None if given != "cpu" else cpus or None
        if devices and given == "auto":
            count = 1 if "/mig-" in devices[0] else whole(amounts[devices[0]])
            self.tell(
                "spec.nprocPerNode", f"auto became {count}: {devices[0]} does not count as a GPU for the control plane"
            )
            return max(1, count)
        self.tell(
            "spec.nprocPerNode",
            f"{given} means one process for each CPU that the Pod asks for ({max(1, cpus)}) now, no longer for each CPU of "
            "the machine",
        )
        return None

    def _env(self, launch: Launch, name: str) -> list[Manifest]:
        env = copy.deepcopy(self.container.get("env") or [])
        texts = [*(launch.command or []), *(launch.args or []), *(str(entry.get("value") or "") for entry in env)]
        given = {entry["name"] for entry in env}
        if not launch.by_torchrun or refers_to_old_variables(texts):
            old = old_variables(name, self.nodes, self.counted)
            if replaced := [entry["name"] for entry in old if entry["name"] in given]:
                self.tell(
                    f"{self.key}.env", f"{', '.join(replaced)} is set as the old operator did, over the container's own"
                )
            # First, so that others may refer to them: $(RANK).
            env = [*old, *(entry for entry in env if entry["name"] not in {entry["name"] for entry in old})]
            what = "the image's own entry point" if not launch.command else repr(launch.command[0])
            self.tell(
                f"{self.key}.command",
                f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are given as the old operator set them, because {what} "
                + ("refers to them" if launch.by_torchrun else "may need them; torchrun within it reads PET_*"),
            )
        if launch.unbuffered and "PYTHONUNBUFFERED" not in given:
            env.append({"name": "PYTHONUNBUFFERED", "value": "1"})
        return env

    def _new_hosts(self, text: str, name: str, field: str) -> str:
        """Names of the old operator's Pods, which scripts give as rendezvous, as those of the new ones."""
        old = re.escape(str(self.old["metadata"].get("name") or ""))
        if not old:
            return text

        def renamed(match: re.Match[str]) -> str:
            index = int(match[2]) + (match[1] == "worker" and "Master" in self.old["spec"]["pytorchReplicaSpecs"])
            host = f"{name}-{TRAINER_CONTAINER}-0-{index}.{name}"
            self.tell(f"{self.key}.{field}", f"the host {match[0]!r} is {host!r} now")
            return host

        return re.sub(rf"(?<![\w.-]){old}-(master|worker)-(\d+)(?![\w-])", renamed, text)

    def _new_value(self, entry: Manifest, name: str) -> Manifest:
        if not isinstance(entry.get("value"), str):
            return entry
        return {**entry, "value": self._new_hosts(entry["value"], name, "env")}
