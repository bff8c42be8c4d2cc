"""`python tests/benchmarks/list_jobs.py`: 1,000 jobs with their Pods listed in one sweep of pages, beside the bare lists.

The server is the tests' stand-in on loopback, whose own time is in both numbers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from api_server import ApiServer, serving
from cluster_kit import Scene, ended

from blueprints.backends.kubernetes import api
from blueprints.backends.kubernetes.backend import KubernetesBackend

JOBS = 1000
PLURALS = ("trainjobs", "pods", "jobs", "jobsets", "events")
MOST_CALLS = 25
"""Calls that are promised at most: pages of 500 objects, nothing per job."""


def fill(server: ApiServer) -> None:
    """A namespace with running, failed and complete jobs."""
    for number in range(JOBS):
        scene = Scene(f"job-{number}").initialized()
        if number % 3 == 0:
            scene.with_pod("node", "Running")
        elif number % 3 == 1:
            scene.with_pod("node", "Failed", state=ended(4)).failed()
        else:
            scene.with_pod("node", "Succeeded", state=ended(0)).complete()
        scene.event("TrainJob", "Note", "a note", first=5)
        for plural, items in zip(
            PLURALS, ([scene.job], scene.pods, scene.jobs, [scene.job_set], scene.events), strict=True
        ):
            for item in items:
                if item is not None:
                    server.put(plural, item)


def timed(server: ApiServer, action: Callable[[], object]) -> tuple[float, int]:
    """Seconds and calls of an action."""
    calls, started = len(server.requests), time.perf_counter()
    action()
    return time.perf_counter() - started, len(server.requests) - calls


def main() -> int:
    """Print both times and calls; exit code 1 above the promise."""
    with serving() as server, tempfile.TemporaryDirectory() as folder:
        fill(server)
        backend = KubernetesBackend.connect(kubeconfig=str(server.kubeconfig(Path(folder) / "config")))
        kinds = (api.TRAINJOBS, api.PODS, api.JOBS, api.JOBSETS, api.EVENTS)
        bare, bare_calls = timed(server, lambda: [backend.cluster.find_all(kind) for kind in kinds])
        alone, alone_calls = timed(server, lambda: backend.cluster.find_all(api.TRAINJOBS))
        ours, calls = timed(server, backend.jobs)
        states = {status.state for status in backend.jobs()}
    print(f"{JOBS} jobs with their states ({', '.join(sorted(states))}): {ours:.2f} s in {calls} calls")
    print(f"the same lists alone: {bare:.2f} s in {bare_calls} calls: {ours / bare:.2f}x; TrainJobs alone: {alone:.2f} s "
          f"in {alone_calls} calls")  # fmt: skip
    kept = calls <= MOST_CALLS and states == {"Running", "Failed", "Complete"}
    print(f"promised: at most {MOST_CALLS} calls: {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
