"""MPIJobs: a launcher that runs mpirun, and nodes that it reaches over ssh."""

from __future__ import annotations

import re

from blueprints.errors import UsageError
from blueprints.jobset import LAUNCHER
from blueprints.migrate.parts import Parts, count_of, gang, replicas_of
from blueprints.migrate.pods import Tell, label_trainer, main_container, replicated_job
from blueprints.runtimes import TRAINER_CONTAINER, Manifest

SPECS = "spec.mpiReplicaSpecs"
SSHD = ["/usr/sbin/sshd", "-De"]
_MOST = 128


def from_mpi_job(old: Manifest, tell: Tell) -> Parts:
    """Take an MPIJob apart.

    Raises:
        UsageError: it has no launcher, no workers, or another MPI than Open MPI.
    """
    spec = old["spec"]
    found = _replicas(old)
    policy = dict(spec.get("runPolicy") or {})
    if spec.get("cleanPodPolicy") and not policy.get("cleanPodPolicy"):
        policy["cleanPodPolicy"] = spec["cleanPodPolicy"]
    over_ssh = old["apiVersion"] != "kubeflow.org/v1"
    as_node = bool(spec.get("runLauncherAsWorker"))
    workers = count_of(found["Worker"][1], f"{SPECS}.{found['Worker'][0]}")
    secret = f"{re.sub(r'[^a-z0-9-]+', '-', str(old['metadata'].get('name') or 'job').lower())}-env"
    built = {}
    for role, name in (("Worker", TRAINER_CONTAINER), ("Launcher", LAUNCHER)):
        written, replica = found[role]
        key = f"{SPECS}.{written}"
        main = main_container(replica["template"]["spec"], spec.get("mainContainer") or "mpi", key)
        built[name] = replicated_job(
            name, replica, main=main, policy=policy, secret=secret, key=key, tell=tell, by_job=over_ssh
        )
    node, launcher = built[TRAINER_CONTAINER], built[LAUNCHER]
    label_trainer(launcher)
    _serve_ssh(node, over_ssh, f"{SPECS}.{found['Worker'][0]}.template.spec.containers[0]", tell)
    pods = [entry["template"]["spec"]["template"]["spec"] for entry in (node, launcher)]
    groups, annotations = gang(policy, pods, workers + 1, tell)
    _creation(spec, launcher, bool(groups), tell)
    return Parts(
        framework="mpi",
        nodes=workers + as_node,
        policy={"numNodes": 1, "mpi": _mpi_policy(spec, as_node, over_ssh, tell)},
        job_set={
            "network": {"publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},
            "replicatedJobs": [node, launcher],
        },
        trainer=lambda _name: _trainer(launcher, spec, workers + as_node),
        run_policy=policy,
        pod_groups=groups,
        annotations=annotations,
        origins={
            "spec.trainer.numNodes": f"{SPECS}.{found['Worker'][0]}.replicas",
            "spec.trainer.numProcPerNode": "spec.slotsPerWorker",
            "spec.trainer": f"{SPECS}.{found['Launcher'][0]}.template.spec.containers[0]",
            "spec.template.spec.replicatedJobs[launcher]": f"{SPECS}.{found['Launcher'][0]}.template.spec",
            "spec.template.spec.replicatedJobs[node]": f"{SPECS}.{found['Worker'][0]}.template.spec",
        },
    )


def _replicas(old: Manifest) -> dict[str, tuple[str, Manifest]]:
    specs, name = old["spec"]["mpiReplicaSpecs"], old["metadata"].get("name")
    found = replicas_of(specs, ("Launcher", "Worker"))
    unknown = [str(key) for key in specs if str(key).lower() not in ("launcher", "worker")]
    if unknown:
        raise UsageError(
            f"MPIJob {name} has replicas {', '.join(unknown)}", where=SPECS, todo="use Launcher and Worker"
        )
    if len(found) < 2:
        missing = "Worker" if "Launcher" in found else "Launcher"
        todo = (
            "Trainer's MPI policy starts a launcher and at least one node; without workers write a TrainJob for torch"
        )
        raise UsageError(f"MPIJob {name} has no {missing}", where=SPECS, todo=todo)
    if count_of(found["Launcher"][1], f"{SPECS}.{found['Launcher'][0]}") != 1:
        raise UsageError(f"MPIJob {name} has not exactly one launcher", where=SPECS, todo="set its replicas to 1")
    implementation = old["spec"].get("mpiImplementation") or "OpenMPI"
    if implementation != "OpenMPI":
        todo = "use an image with Open MPI: Trainer writes its hostfile and its variables for that one alone"
        raise UsageError(f"{implementation} is not supported", where="spec.mpiImplementation", todo=todo)
    return found


def _mpi_policy(spec: Manifest, as_node: bool, over_ssh: bool, tell: Tell) -> Manifest:
    path = spec.get("sshAuthMountPath")
    if path is None:
        path = "/root/.ssh"
        if over_ssh:
            tell(
                "spec.sshAuthMountPath",
                "is /root/.ssh, as it was by default: an image of another user needs another path",
            )
    return {
        "numProcPerNode": int(spec.get("slotsPerWorker") or 1), "mpiImplementation": "OpenMPI", "sshAuthMountPath": path,
        "runLauncherAsNode": as_node,
    }  # fmt: skip


def _serve_ssh(node: Manifest, over_ssh: bool, key: str, tell: Tell) -> None:
    """What the workers run: the old operators started sshd, or kept idle Pods that `kubectl exec` went into."""
    pod = node["template"]["spec"]["template"]["spec"]
    container = next(entry for entry in pod["containers"] if entry["name"] == TRAINER_CONTAINER)
    if not over_ssh:
        idle = [*(container.pop("command", None) or []), *(container.pop("args", None) or [])]
        container["command"] = list(SSHD)
        was = f"instead of {' '.join(idle)!r}" if idle else "as the workers' command"
        tell(
            key,
            f"{SSHD[0]} runs {was}: Trainer reaches its nodes over ssh, MPIJob v1 did with kubectl exec. The image needs "
            "sshd and an ssh client",
        )
    elif not container.get("command") and not container.get("args"):
        container["command"] = list(SSHD)  # what the operator did


def _creation(spec: Manifest, launcher: Manifest, is_gang: bool, tell: Tell) -> None:
    if not is_gang:  # a gang has to be there at once
        replicated: Manifest = {"name": launcher["name"], "dependsOn": [{"name": TRAINER_CONTAINER, "status": "Ready"}]}
        rest = dict(launcher)
        launcher.clear()
        launcher.update({**replicated, **rest})
        if spec.get("launcherCreationPolicy") != "WaitForWorkersReady":
            tell(
                "spec.launcherCreationPolicy",
                "became WaitForWorkersReady: the launcher starts when all nodes are ready",
            )
    elif spec.get("launcherCreationPolicy") == "WaitForWorkersReady":
        tell("spec.launcherCreationPolicy", "was dropped: a gang starts at once, and ssh tries ten times")


def _trainer(launcher: Manifest, spec: Manifest, nodes: int) -> Manifest:
    """Command and counts; resources and variables stay in the runtime, where launcher and nodes have their own."""
    pod = launcher["template"]["spec"]["template"]["spec"]
    container = next(entry for entry in pod["containers"] if entry["name"] == TRAINER_CONTAINER)
    trainer: Manifest = {}
    for key in ("command", "args"):
        if container.get(key) is not None and len(container[key]) <= _MOST:
            trainer[key] = container.pop(key)
    return {**trainer, "numNodes": nodes, "numProcPerNode": int(spec.get("slotsPerWorker") or 1)}
