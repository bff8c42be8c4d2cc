"""A stand-in for the controllers of a cluster, on the stand-in for its API server: TrainJobs become JobSets, Jobs and Pods,
whose containers are processes of this machine.

It lets the end-to-end suite for real clusters run offline. What it knows of Trainer, JobSet, the Job controller and the
kubelet is what that suite needs; what a real control plane does, only a real one shows.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from api_server import ApiServer
from cluster_kit import INDEX_KEY, JOBSET_LABEL, REPLICATED_LABEL, ago, condition, ended, waiting

from blueprints.jobset import build_job_set
from blueprints.resolve import Step, steps_of

Manifest = dict[str, Any]


class Played:
    """One TrainJob being run."""

    def __init__(self, server: ApiServer, job: Manifest, runtime: Manifest, folder: Path) -> None:
        self.server, self.job, self.folder = server, job, folder
        self.name = job["metadata"]["name"]
        self.job_set = build_job_set(job, runtime)
        self.steps = steps_of(self.job_set)
        self.running: dict[str, tuple[subprocess.Popen[str], str, Path]] = {}
        self.done: dict[str, bool] = {}
        self.attempts: dict[str, int] = {}
        self.began = time.monotonic()
        self.pods = 0
        self.over = False
        self._put("jobsets", self.job_set | {"kind": "JobSet"}, self.name)

    def _put(self, plural: str, item: Manifest, name: str, **labels: str) -> None:
        metadata = {"name": name, "labels": {JOBSET_LABEL: self.name, **labels}}
        self.server.put(plural, {**item, "metadata": {**(item.get("metadata") or {}), **metadata}})

    def tick(self) -> None:
        """Start what may start, see what has ended."""
        deadline = self.job["spec"].get("activeDeadlineSeconds")
        if deadline is not None and time.monotonic() - self.began > deadline:
            self.stop()
            self.end("Failed", "DeadlineExceeded", "TrainJob exceeded its active deadline")
            return
        for step in self.steps:
            if step.name not in self.done and step.name not in self.running and self._may_start(step):
                self._start(step)
        for step in self.steps:
            if step.name in self.running and self.running[step.name][0].poll() is not None:
                self._ended(step)
        targets = [step for step in self.steps if step.replicated_job == "node"]
        if not self.over and all(self.done.get(step.name) for step in targets):
            self.end("Complete", "AllJobsCompleted", "jobset completed successfully")

    def _may_start(self, step: Step) -> bool:
        before = {dependency.replicated_job for dependency in step.depends_on}
        return all(self.done.get(other.name) for other in self.steps if other.replicated_job in before)

    def _start(self, step: Step) -> None:
        if not any(job == f"{self.name}-{step.replicated_job}-0" for job in self.server.all("jobs")):
            count = sum(other.replicated_job == step.replicated_job for other in self.steps)
            body = {"kind": "Job", "spec": {"parallelism": count}, "status": {}}
            self._put("jobs", body, f"{self.name}-{step.replicated_job}-0", **{REPLICATED_LABEL: step.replicated_job})
        self.pods += 1
        pod = f"{self.name}-{step.replicated_job}-0-{step.index}-{self.pods:05x}"
        if "registry.invalid" in step.image:
            self.done[step.name] = False
            self._pod(step, pod, "Pending", waiting("ImagePullBackOff", f'Back-off pulling image "{step.image}"'))
            return
        cause = self.folder / f"{pod}.cause"
        cause.touch()
        env = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(step.index),
        }
        for entry in step.env:
            value = str(step.index) if entry.field_path else entry.value or ""
            env[entry.name] = expand(value, env)
        env["BLUEPRINTS_TERMINATION_LOG"] = str(cause)
        words = [expand(word, env).replace("/dev/termination-log", str(cause)) for word in step.argv]
        process = subprocess.Popen(
            words, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        self.running[step.name] = (process, pod, cause)
        self.server.logs[pod, step.container] = []
        threading.Thread(target=self._read, args=(process, self.server.logs[pod, step.container]), daemon=True).start()
        self._pod(step, pod, "Running", {"running": {"startedAt": ago(0)}})

    def _read(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:  # one by one, as they come
            lines.append(  # noqa: PERF401 - extend() would wait for the end
                f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%S.%fZ')} {line.rstrip()}"
            )

    def _pod(self, step: Step, pod: str, phase: str, state: Manifest) -> None:
        labels = {REPLICATED_LABEL: step.replicated_job, INDEX_KEY: str(step.index)}
        status = {
            "name": step.container, "image": step.image, "imageID": "", "ready": phase == "Running", "restartCount": 0, "state": state,
        }  # fmt: skip
        body = {
            "kind": "Pod", "metadata": {"annotations": {INDEX_KEY: str(step.index)}},
            "spec": {"containers": [{"name": step.container, "image": step.image}]},
            "status": {"phase": phase, "startTime": ago(0), "conditions": [], "containerStatuses": [status]},
        }  # fmt: skip
        self._put("pods", body, pod, **labels)
        self._event(pod, phase)

    def _event(self, pod: str, reason: str) -> None:
        uid = self.server.all("pods")[pod]["metadata"]["uid"]
        self.server.put("events", {
            "metadata": {"name": f"{pod}.{time.monotonic_ns():x}"}, "reason": reason, "message": reason, "type": "Normal",
            "involvedObject": {"kind": "Pod", "name": pod, "uid": uid}, "firstTimestamp": ago(0), "lastTimestamp": ago(0),
        })  # fmt: skip

    def _ended(self, step: Step) -> None:
        process, pod, cause = self.running.pop(step.name)
        time.sleep(0.05)  # its last lines
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        self._pod(step, pod, "Failed" if code else "Succeeded", ended(code, cause.read_text()))
        if code == 0:
            self.done[step.name] = True
            return
        self.attempts[step.name] = self.attempts.get(step.name, 0) + 1
        matched = code in step.failure.fail_on
        if not matched and self.attempts[step.name] <= step.failure.backoff_limit:
            return  # started again by the next tick
        reason = "PodFailurePolicy" if matched else "BackoffLimitExceeded"
        job = f"{self.name}-{step.replicated_job}-0"
        self.server.change("jobs", job, status={"conditions": [condition("Failed", reason, f"exit code {code}")]})
        self.stop()
        said = f"jobset failed due to one or more job failures (first failed job: {job})"
        self.end("Failed", "FailedJobs", said)

    def stop(self, *, remove: bool = False) -> None:
        """Kill what runs; with `remove` its Pods are gone too."""
        for process, pod, _ in self.running.values():
            process.kill()
            process.wait()
            if remove:
                self.server.remove("pods", pod)
        self.running.clear()

    def end(self, kind: str, reason: str, message: str) -> None:
        """The TrainJob's last condition."""
        self.over = True
        with contextlib.suppress(KeyError):  # deleted meanwhile
            self.server.change("trainjobs", self.name, status={"conditions": [condition(kind, reason, message)]})

    def remove(self) -> None:
        """All that belongs to a deleted TrainJob."""
        self.stop()
        for plural in ("pods", "jobs", "jobsets"):
            for name, item in list(self.server.all(plural).items()):
                if (item["metadata"].get("labels") or {}).get(JOBSET_LABEL) == self.name:
                    self.server.remove(plural, name)


def expand(text: str, env: dict[str, str]) -> str:
    """`$(NAME)` and `$$` as the kubelet replaces them."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


class Player(threading.Thread):
    """Plays the controllers until it is closed."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__(daemon=True)
        self.server, self.played = server, dict[str, Played]()
        self.closing = threading.Event()
        self.folder = tempfile.TemporaryDirectory()

    def run(self) -> None:
        while not self.closing.wait(0.1):
            jobs = {item["metadata"]["uid"]: item for item in list(self.server.all("trainjobs").values())}
            for uid in set(self.played) - set(jobs):
                self.played.pop(uid).remove()
            for uid, job in jobs.items():
                self._play(uid, job)

    def _play(self, uid: str, job: Manifest) -> None:
        name = job["metadata"]["name"]
        there = self.played.get(uid)
        if job["spec"].get("suspend"):
            if not (job.get("status") or {}).get("conditions"):
                told = condition("Suspended", "Suspended", "TrainJob is suspended")
                self.server.change("trainjobs", name, status={"conditions": [told]})
            if there is not None:
                self.played.pop(uid).stop(remove=True)
            return
        if there is None:
            reference = job["spec"]["runtimeRef"]
            plural = "trainingruntimes" if reference.get("kind") == "TrainingRuntime" else "clustertrainingruntimes"
            told = [condition("Suspended", "Resumed", "TrainJob is resumed", "False")]
            if (job.get("status") or {}).get("conditions"):
                self.server.change("trainjobs", name, status={"conditions": told})
            self.played[uid] = Played(
                self.server, job, self.server.all(plural)[reference["name"]], Path(self.folder.name)
            )
        elif not there.over:
            there.tick()

    def close(self) -> None:
        """End all that runs."""
        self.closing.set()
        self.join(10)
        for played in self.played.values():
            played.stop()
        self.folder.cleanup()
