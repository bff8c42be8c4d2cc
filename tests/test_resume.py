"""Interrupted runs of every method, under every strategy: the same command goes on and ends as the unbroken run."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sft_workspace import build, command, environment, losses, run_record, train

from blueprints.recipe import load_recipe
from blueprints.recipe.shipped import shipped_names
from trainers.__main__ import METHODS

STEPS = ("training.max_steps=12", "training.save_steps=2", "lora.lora_dropout=0.1")
BOTH = ("resources.num_proc_per_node=2", "training.per_device_train_batch_size=2")
KILLS = 20
"""Kills at random moments over all methods, at least."""

FORKER = """
import json, os, sys
sys.argv = ["trainers"]
from trainers.quiet import quiet
quiet(main=True)
import importlib, torch
from trainers.__main__ import METHODS, run
import trainers.run
for name in METHODS.values():
    importlib.import_module(name.partition(":")[0])
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ.update(order["environment"])
        out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["trainers", *order["arguments"]]
        os._exit(run())
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Forker:
    """Trainers whose libraries are imported once: a start costs a second, so that many kills are affordable."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", FORKER], env=environment(Path("/nowhere")), text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def start(self, root: Path, arguments: list[str]) -> int:
        """Start a training process; returns its id."""
        here = {"BLUEPRINTS_WORKSPACE": str(root), "BLUEPRINTS_TERMINATION_LOG": str(root / "termination"),
                "BLUEPRINTS_PROGRESS": str(root / "progress.json")}  # fmt: skip
        order = {"environment": here, "arguments": arguments, "log": str(root / "log")}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        """The exit code of the process that was started last."""
        assert self.process.stdout
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    made = Forker()
    yield made
    assert made.process.stdin
    made.process.stdin.close()
    made.process.wait(30)


def prepared(root: Path, recipe: str, overrides: list[str]) -> None:
    """Run the initializers of `recipe` into the workspace `root`."""
    loaded = load_recipe(recipe, overrides=overrides).recipe
    base = environment(root) | {"BLUEPRINTS_RECIPE": recipe, "BLUEPRINTS_OVERRIDES": json.dumps(overrides)}
    for step, uri in (("model", loaded.model.uri), ("dataset", loaded.dataset.uri)):
        done = subprocess.run([sys.executable, "-m", "initializers", step], env=base | {"STORAGE_URI": uri}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout


SHORT = ["training.max_steps=10", "training.save_steps=2", "training.per_device_train_batch_size=4",
         "training.logging_steps=1", "eval.max_rows=4", "eval.metric=none", "eval.samples=2", "eval.max_new_tokens=8",
         "dataset.max_rows=64"]  # fmt: skip
METHODS_OWN = {
    "grpo": ["grpo.num_generations=2", "grpo.max_completion_length=8"],
    "ppo": ["ppo.max_completion_length=8"],
}


def lines(root: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what is a matter of the clock."""
    path = root / "output" / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    timed = ("second", "runtime", "time")
    return [{name: value for name, value in line.items() if not any(word in name for word in timed)} for line in found]


def weights(root: Path) -> dict[str, bytes]:
    """The trained weights by file."""
    return {path.name: path.read_bytes() for path in sorted((root / "output").glob("[am]*/*.safetensors"))}


def kill_often(forker: Forker, root: Path, arguments: list[str], kills: int, chance: random.Random) -> int:
    """Start the run and kill it at random moments of its steps, `kills` times; returns how often it was killed."""
    done = 0
    for turn in range(kills):
        pid = forker.start(root, arguments)
        # The steps are spread over the kills, so that each start gets a little further.
        target = min(9, 1 + turn * 9 // kills + chance.randint(0, 1))
        deadline = time.monotonic() + 240
        while len(lines(root)) < target and time.monotonic() < deadline and Path(f"/proc/{pid}/exe").exists():
            time.sleep(0.01)
        time.sleep(chance.random() * 0.1)
        if json.loads((root / "output" / "run.json").read_text())["status"] != "running":
            assert forker.wait() == 0, (root / "log").read_text()
            break
        os.kill(pid, signal.SIGKILL)
        assert forker.wait() == -signal.SIGKILL
        done += 1
    return done


@pytest.mark.slow
@pytest.mark.covers(method=list(METHODS), tuning="lora", world="1 process", feature="resume")
def test_runs_of_every_method_killed_at_random_moments_end_as_the_unbroken_ones(
    forker: Forker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    chance, total = random.Random(seed), 0
    recipes = {method: "quickstart" if method == "sft" else f"quickstart-{method}" for method in METHODS}
    recipes = {method: name for method, name in recipes.items() if name in shipped_names()}
    each = -(-KILLS // len(recipes)) + 1
    for method, recipe in recipes.items():
        overrides = [*SHORT, *METHODS_OWN.get(method, [])]
        prepared(tmp_path / method, recipe, overrides)
        broken = tmp_path / f"{method}-broken"
        shutil.copytree(tmp_path / method, broken)
        arguments = ["--recipe", recipe, *overrides]
        forker.start(tmp_path / method, arguments)
        assert forker.wait() == 0, (tmp_path / method / "log").read_text()
        kills = kill_often(forker, broken, arguments, each, chance)
        forker.start(broken, arguments)
        assert forker.wait() == 0, (broken / "log").read_text()
        total += kills
        with capsys.disabled():
            print(f"\n{method}: {kills} kills (seed {seed})")
        assert lines(broken) == lines(tmp_path / method), f"{method}, seed {seed}"
        assert weights(broken) == weights(tmp_path / method), f"{method}, seed {seed}"
    with capsys.disabled():
        print(f"{total} random kills over {len(recipes)} methods")
    assert total >= KILLS


def start(root: Path, *overrides: str, **how: Any) -> subprocess.Popen[str]:
    """Start the trainer; its output goes to a file."""
    with (root / "first.log").open("a") as log:
        return subprocess.Popen(command(root, *overrides, **how), env=environment(root), cwd=root, text=True,
                                stdout=log, stderr=subprocess.STDOUT)  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[str], root: Path) -> None:
    """Until the file is there."""
    deadline = time.monotonic() + 180
    while not path.exists():
        assert process.poll() is None, (root / "first.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            name, marks=pytest.mark.covers(method="sft", tuning=["lora", "full"], world=name, feature="resume")
        )
        for name in ("ddp", "fsdp", "zero2", "zero3")
    ],
)
def test_two_processes_go_on_under_every_strategy(strategy: str, tuning: str, tmp_path: Path) -> None:
    lora = () if tuning == "lora" else ("lora=null",)
    steps = tuple(word for word in STEPS if tuning == "lora" or "lora" not in word)
    overrides = (*steps, *BOTH, *lora, f"resources.strategy={strategy}")
    whole, root = build(tmp_path / "whole"), build(tmp_path / "broken")
    done = train(whole, *overrides, processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    process = start(root, *overrides, processes=2, launch=True)
    wait_for(root / "output" / f"checkpoint-{random.choice([2, 4, 6])}" / "complete.json", process, root)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = train(root, *overrides, processes=2, launch=True)
    assert again.returncode == 0, again.stdout
    assert "going on from checkpoint-" in again.stdout
    # Sums over processes and random numbers are the same ones: bitwise here; 1e-6 is what is promised.
    assert losses(root) == pytest.approx(losses(whole), rel=1e-6)
    assert run_record(root)["metrics"]["tokens"] == run_record(whole)["metrics"]["tokens"]
    if tuning == "lora":
        small_checkpoint(root)


def small_checkpoint(root: Path) -> None:
    """No file of the newest checkpoint holds the base model's weights."""
    newest = max((root / "output").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    if (newest / "shards").exists():
        from torch.distributed.checkpoint import FileSystemReader

        # By name: at this size each tensor's own kilobytes of overhead weigh more than its values.
        kept = FileSystemReader(newest / "shards").read_metadata().state_dict_metadata
        assert all("lora_" in name for name in kept if name.startswith("model."))
        return
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.suffix not in (".py", ".json", ".pth"))
    trained = (root / "output" / "adapter" / "adapter_model.safetensors").stat().st_size
    # Adapter, two moments and float32 copies, with each file's own overhead; the base would add its whole size.
    base = (root / "model" / "model.safetensors").stat().st_size
    assert size < 8 * trained + base / 2, f"{size} bytes for an adapter of {trained}"


@pytest.mark.covers(method="sft", tuning="lora", world="fsdp", feature="resume")
def test_fsdp_stopped_by_sigterm_goes_on(tmp_path: Path) -> None:
    overrides = (*STEPS, *BOTH, "resources.strategy=fsdp", "training.max_steps=400", "training.save_steps=1000")
    root = build(tmp_path)
    process = start(root, *overrides, processes=2, launch=True)
    wait_for(root / "output" / "metrics.jsonl", process, root)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, (root / "first.log").read_text()
    stopped = len(losses(root))
    assert stopped < 400
    process = start(root, *overrides, processes=2, launch=True)
    deadline = time.monotonic() + 120
    while len(losses(root)) <= stopped and time.monotonic() < deadline:
        assert process.poll() is None, (root / "first.log").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, (root / "first.log").read_text()
    assert f"going on from checkpoint-{stopped}" in (root / "first.log").read_text()


@pytest.mark.parametrize("lora", ["lora", "full"])
def test_a_disk_that_is_full_during_a_checkpoint_loses_nothing(lora: str, tmp_path: Path) -> None:
    overrides = [word for word in STEPS if lora == "lora" or "lora" not in word] + (
        [] if lora == "lora" else ["lora=null"]
    )
    whole, root = build(tmp_path / "whole"), build(tmp_path / "full")
    process = start(root, *overrides)
    wait_for(root / "output" / "checkpoint-2" / "complete.json", process, root)
    limit = 20_000  # bytes that a file may have from now on: less than the weights, more than the small files
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    assert process.wait(120) == 5, (root / "first.log").read_text()
    log = (root / "first.log").read_text()
    assert "Traceback" not in log
    assert "free disk space" in log
    assert json.loads((root / "termination").read_text())["exit_code"] == 5
    left = [path.name for path in (root / "output").glob("checkpoint-*")]
    assert left
    assert all((root / "output" / name / "complete.json").exists() for name in left)
    again = train(root, *overrides)
    assert again.returncode == 0, again.stdout
    assert "going on from checkpoint-" in again.stdout
    done = train(whole, *overrides)
    assert done.returncode == 0, done.stdout
    assert losses(root) == losses(whole)


def agent(root: Path, node: int, port: int, *overrides: str) -> subprocess.Popen[str]:
    """The torchrun of one of two nodes, as a cluster starts it, which begins again when a process fails."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes=2", "--nproc-per-node=1", "--max-restarts=5",
                "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{port}",
                f"--rdzv-conf=is_host={str(node == 0).lower()},last_call_timeout=2", "--local-addr=127.0.0.1"]  # fmt: skip
    arguments = ["-m", "trainers", "--recipe", str(root / "recipe.yaml"), *overrides]
    with (root / f"node-{node}.log").open("a") as log:
        return subprocess.Popen([sys.executable, "-m", "trainers.launch", *torchrun, *arguments], cwd=root, text=True,
                                env=environment(root), stdout=log, stderr=subprocess.STDOUT)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["process", "node"])
@pytest.mark.covers(method="sft", tuning="lora", world="ddp", feature="resume")
def test_a_run_of_two_nodes_goes_on_by_itself_when_one_is_lost(lost: str, tmp_path: Path) -> None:
    import socket

    overrides = (*STEPS, "training.max_steps=60", "resources.num_nodes=2", "training.per_device_train_batch_size=2")
    whole = build(tmp_path / "whole")
    single = [word for word in overrides if "num_nodes" not in word]
    done = train(whole, *single, "resources.num_proc_per_node=2", processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    root = build(tmp_path / "broken")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [agent(root, node, port, *overrides) for node in (0, 1)]
    try:
        deadline = time.monotonic() + 180
        while not (root / "output" / "checkpoint-4" / "complete.json").exists():
            assert nodes[0].poll() is None, (root / "node-0.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if lost == "node":
            nodes[1].kill()  # its torchrun and its process notice and end
            nodes[1].wait()
            nodes[1] = agent(root, 1, port, *overrides)  # the Pod starts again
        else:
            os.kill(children(children(nodes[1].pid)[0])[0], signal.SIGKILL)
        codes = [node.wait(240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    log = (root / "node-0.log").read_text() + (root / "node-1.log").read_text()
    assert codes == [0, 0], log
    assert "going on from checkpoint-" in log
    assert losses(root) == pytest.approx(losses(whole), rel=1e-6)


def children(pid: int) -> list[int]:
    """Process ids of the direct children."""
    found = subprocess.run(["pgrep", "-P", str(pid)], text=True, capture_output=True, check=False)
    return [int(line) for line in found.stdout.split()]
