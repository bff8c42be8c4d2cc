"""How long the client takes to start, beside Python itself in the same run.

    python tests/benchmarks/startup.py

Limits: `import blueprints` 150 ms, `blueprints --help` 250 ms, both with Python's own start. Exit code 1 above them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 15
COMMANDS: dict[str, tuple[list[str], float]] = {
    "python -c pass": (["-c", "pass"], float("inf")),
    "import blueprints": (["-c", "import blueprints"], 0.150),
    "blueprints --help": (["-m", "blueprints", "--help"], 0.250),
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """Measure in interleaved rounds and print medians."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, (arguments, _limit) in COMMANDS.items():
            taken[name].append(seconds(arguments))
    bare = statistics.median(taken["python -c pass"])
    slow = False
    for name, (_arguments, limit) in COMMANDS.items():
        median = statistics.median(taken[name])
        slow |= median > limit
        print(f"{name:<20} {1000 * median:6.0f} ms  {median / bare:5.1f} × python")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
