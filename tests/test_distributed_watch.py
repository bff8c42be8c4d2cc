"""A process that dies or hangs ends the job, and is named with its node: real torchrun, real gloo, a loop instead of a
training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sft_workspace import environment

WORKER = """
import os, sys, time
from datetime import timedelta
from trainers import process
process.register()
import torch
from trainers import diagnose
from trainers.watch import WATCH

def reward():
    {hang}

def main():
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    here = process.world()
    WATCH.start(here, {limit})
    for step in range(1, 400):
        WATCH.tick(step)
        if here.rank == {rank} and step == 20:
            open("there", "w").write(str(os.getpid()))
            reward()
        torch.distributed.all_reduce(torch.ones(2))
        time.sleep(0.05)

process.STOP.at_step_end()
code = 1
try:
    main()
    code = 0
except Exception as error:
    code = diagnose.report(error)
finally:
    process.leave_exit_code(code)
os._exit(code)
"""


def start(root: Path, *, hang: str = "pass", rank: int = 1, limit: float = 6.0) -> subprocess.Popen[str]:
    """Two processes in a loop of all-reduces; `rank` runs `hang` at step 20."""
    (root / "worker.py").write_text(WORKER.format(hang=hang, rank=rank, limit=limit))
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    with (root / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainers.launch", torchrun, "--nproc-per-node=2", "--rdzv-backend=c10d",
             "--rdzv-endpoint=127.0.0.1:0", "worker.py"],
            env=environment(root), cwd=root, text=True, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def pid_at_step_20(root: Path, process: subprocess.Popen[str]) -> int:
    """Process id of the one that is about to misbehave."""
    deadline = time.monotonic() + 90
    while not (root / "there").exists() or not (root / "there").read_text():
        assert process.poll() is None, (root / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int((root / "there").read_text())


def ends(root: Path, process: subprocess.Popen[str], within: float) -> tuple[int, str, dict[str, object]]:
    """Exit code, log and termination message of the job, which must end in time."""
    try:
        code = process.wait(within)
    finally:
        process.kill()
    return code, (root / "log").read_text(), json.loads((root / "termination").read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_stuck_in_the_users_code_is_named_with_its_line(rank: int, tmp_path: Path) -> None:
    running = start(tmp_path, hang="time.sleep(1000)", rank=rank)
    pid_at_step_20(tmp_path, running)
    code, log, termination = ends(tmp_path, running, 45)
    assert code == 4, log
    assert f"rank {rank} on node {os.uname().nodename}" in log
    assert "worker.py:" in log
    assert " reward (" in log or " reward;" in log or " reward." in log
    assert f"rank {1 - rank}: waits in" in log
    assert f"rank {rank}, node" in str(termination["where"])
    assert "training.ddp_timeout" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_named(rank: int, tmp_path: Path) -> None:
    running = start(tmp_path, rank=rank)
    os.kill(pid_at_step_20(tmp_path, running), signal.SIGSTOP)
    code, log, _ = ends(tmp_path, running, 60)
    assert code == 5, log
    assert f"rank {rank} on node {os.uname().nodename} has given no sign of life" in log


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named_at_once(rank: int, tmp_path: Path) -> None:
    running = start(tmp_path, rank=rank, limit=60)
    os.kill(pid_at_step_20(tmp_path, running), signal.SIGKILL)
    code, log, _ = ends(tmp_path, running, 40)
    assert code == 137, log
    assert f"rank {rank}, pid" in log
    assert "killed by SIGKILL" in log
    assert "Traceback" not in log
