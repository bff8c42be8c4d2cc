"""Whatever ends a run, the same command goes on, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from sft_workspace import build, command, environment, losses, run_record, train

STEPS = ("training.max_steps=40", "training.save_steps=3", "training.logging_steps=2", "lora.lora_dropout=0.1")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of forty steps, over four epochs, that nothing disturbs."""
    root = build(tmp_path_factory.mktemp("unbroken"))
    done = train(root, *STEPS)
    assert done.returncode == 0, done.stdout
    return root


def start(root: Path, *overrides: str, **how: Any) -> subprocess.Popen[str]:
    """Start the trainer; its output goes to a file."""
    with (root / "first.log").open("w") as log:
        return subprocess.Popen(command(root, *overrides, **how), env=environment(root), cwd=root, text=True,
                                stdout=log, stderr=subprocess.STDOUT)  # fmt: skip


def wait_for_step(root: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the run has logged `step`."""
    path = root / "output" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, (root / "first.log").read_text()
        if path.exists() and len(path.read_text().splitlines()) * 2 >= step:
            return
        time.sleep(0.002)
    raise AssertionError("the run did not get to the step")


def same_run(root: Path, unbroken: Path) -> None:
    """Losses, token counts, measures and weights are those of the unbroken run; no step is there twice."""
    assert losses(root) == losses(unbroken)
    lines = [json.loads(line) for line in (root / "output" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 41, 2))
    ours, theirs = run_record(root)["metrics"], run_record(unbroken)["metrics"]
    for name in ("train_loss", "tokens", "steps", "eval_loss_before", "eval_loss_after", "exact_match_after"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
    weights = "output/adapter/adapter_model.safetensors"
    assert (root / weights).read_bytes() == (unbroken / weights).read_bytes()


def test_a_run_killed_at_a_random_step_ends_as_the_unbroken_one(unbroken: Path, tmp_path: Path) -> None:
    root = build(tmp_path)
    process = start(root, *STEPS)
    wait_for_step(root, random.randint(4, 34), process)
    process.kill()
    process.wait()
    again = train(root, *STEPS)
    assert again.returncode == 0, again.stdout
    assert "going on from checkpoint-" in again.stdout
    same_run(root, unbroken)


def test_a_run_killed_after_its_last_step_makes_no_step_more(tmp_path: Path) -> None:
    root = build(tmp_path)
    steps = ("training.max_steps=7", "training.lr_scheduler_type=constant", "training.save_steps=3")
    process = start(root, *steps)
    last = root / "output" / "checkpoint-7"
    deadline = time.monotonic() + 120
    while not (last / "complete.json").exists():
        assert process.poll() is None, (root / "first.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    trained = (last / "adapter_model.safetensors").read_bytes()
    again = train(root, *steps)
    assert again.returncode == 0, again.stdout
    assert "going on from checkpoint-7" in again.stdout
    assert len(losses(root)) == run_record(root)["metrics"]["steps"] == 7
    assert (root / "output" / "adapter" / "adapter_model.safetensors").read_bytes() == trained
    # What the run took before it was killed counts: otherwise the pace would be that of no time at all.
    assert run_record(root)["metrics"]["train_seconds"] > 0.03


@pytest.mark.parametrize("damage", ["truncated", "changed", "unsealed"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage: str, unbroken: Path, tmp_path: Path) -> None:
    root = build(tmp_path)
    process = start(root, *STEPS)
    wait_for_step(root, 14, process)
    process.kill()
    process.wait()
    newest = max(
        (root / "output").glob("checkpoint-*/complete.json"), key=lambda path: int(path.parent.name[11:])
    ).parent
    weights = newest / "adapter_model.safetensors"
    if damage == "truncated":
        os.truncate(weights, 100)
    elif damage == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    else:
        (newest / "complete.json").unlink()
    again = train(root, *STEPS)
    assert again.returncode == 0, again.stdout
    assert f"{newest.name} is not used" in again.stdout
    assert f"going on from {newest.name}" not in again.stdout
    same_run(root, unbroken)


def test_sigterm_saves_exits_143_and_the_next_start_goes_on(unbroken: Path, tmp_path: Path) -> None:
    root = build(tmp_path)
    process = start(root, *STEPS, launch=True)
    wait_for_step(root, 9, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, (root / "first.log").read_text()
    assert "stopped on request at step" in (root / "first.log").read_text()
    assert run_record(root)["status"] == "stopped"
    again = train(root, *STEPS, launch=True)
    assert again.returncode == 0, again.stdout
    same_run(root, unbroken)


def test_sigterm_before_training_exits_143_as_well(tmp_path: Path) -> None:
    root = build(tmp_path)
    process = start(root, *STEPS, launch=True)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, (root / "first.log").read_text()


@pytest.mark.slow
def test_two_processes_killed_at_a_random_step(tmp_path: Path) -> None:
    both = (*STEPS, "resources.num_proc_per_node=2", "training.per_device_train_batch_size=2")
    whole, root = build(tmp_path / "whole"), build(tmp_path / "broken")
    done = train(whole, *both, processes=2)
    assert done.returncode == 0, done.stdout
    process = start(root, *both, processes=2)
    wait_for_step(root, random.randint(4, 34), process)
    process.kill()  # torchrun alone: the training processes notice and end by themselves
    process.wait()
    again = train(root, *both, processes=2)
    assert again.returncode == 0, again.stdout
    same_run(root, whole)


@pytest.mark.slow
def test_two_processes_stop_together(tmp_path: Path) -> None:
    both = (*STEPS, "resources.num_proc_per_node=2", "training.per_device_train_batch_size=2")
    root = build(tmp_path)
    process = start(root, *both, processes=2, launch=True)
    wait_for_step(root, 9, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, (root / "first.log").read_text()
    again = train(root, *both, processes=2, launch=True)
    assert again.returncode == 0, again.stdout
    assert run_record(root)["metrics"]["steps"] == 40
