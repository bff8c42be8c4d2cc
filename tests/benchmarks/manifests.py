"""`python tests/benchmarks/manifests.py`: TrainJobs written and checked per second and core, beside writing them as YAML
alone with PyYAML."""

from __future__ import annotations

import time
from collections.abc import Callable

import yaml

from blueprints.manifests import require_valid
from blueprints.recipe import load_recipe
from blueprints.trainjob import runtime_for, train_job

COUNT = 1000
WANTED = 500.0
"""TrainJobs per second and core that are promised."""


def rate(action: Callable[[int], object]) -> float:
    """Calls per second of this process's CPU time."""
    started = time.process_time()
    for number in range(COUNT):
        action(number)
    return COUNT / (time.process_time() - started)


def main() -> int:
    """Print both rates and their ratio; exit code 1 below the promise."""
    loaded = load_recipe("sft-lora", overrides=["resources.gpu=8", "resources.num_nodes=4"], environ={})
    runtime = runtime_for(loaded.recipe)

    def write_and_check(number: int) -> None:
        require_valid(train_job(loaded, runtime, name=f"job-{number}"), runtime)

    job = train_job(loaded, runtime, name="job")
    ours, plain = rate(write_and_check), rate(lambda _: yaml.safe_dump(job))
    print(
        f"written and checked: {ours:,.0f} TrainJobs/s per core; PyYAML alone writes {plain:,.0f}/s: {ours / plain:.2f}x"
    )
    print(f"promised: {WANTED:,.0f}/s: {'kept' if ours >= WANTED else 'NOT KEPT'}")
    return 0 if ours >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
