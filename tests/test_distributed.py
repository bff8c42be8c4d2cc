"""Several processes: every strategy is really in effect, and the losses are those of one process with the same batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sft_workspace import build, command, environment, losses, run_record, train, train_here

from blueprints.errors import EnvironmentFault
from blueprints.recipe import load_recipe

STEPS = ("training.max_steps=4", "training.save_steps=100")
BOTH = ("resources.num_proc_per_node=2", "training.per_device_train_batch_size=2")
TUNING = {
    "full": ("lora=null",),
    "lora": (),
    "qlora": ("lora.quantize_base=true",),
    "dora": ("lora.use_dora=true",),
}
RTOL = {"ddp": 1e-6, "fsdp": 1e-5, "zero2": 1e-5, "zero3": 1e-5}
"""How far a step's loss may be from that of one process, relative: sums of gradients in another order, 4 steps."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses of one process by tuning."""
    known: dict[str, list[float]] = {}

    def losses_of(tuning: str) -> list[float]:
        if tuning not in known:
            root = build(tmp_path_factory.mktemp(tuning))
            with pytest.MonkeyPatch.context() as patch:
                assert train_here(root, patch, *STEPS, *TUNING[tuning]) == 0
            known[tuning] = losses(root)
        return known[tuning]

    return losses_of


def sharded_bytes(record: dict[str, Any]) -> tuple[int, int]:
    """Bytes on one rank and bytes over all, as the effective settings say."""
    words = record["effective"]["sharded"].replace(",", "").split()
    at = words.index("of")
    return int(words[at - 1]), int(words[at + 1])


def check(strategy: str, tuning: str, root: Path, expected: list[float], *overrides: str) -> str:
    """Train with two processes; strategy, losses and proof must be right. Returns the log."""
    done = train(root, *STEPS, *BOTH, *TUNING[tuning], f"resources.strategy={strategy}", *overrides, processes=2,
                 launch=True)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert losses(root) == pytest.approx(expected, rel=RTOL[strategy])
    record = run_record(root)
    assert record["effective"]["strategy"] == strategy
    if strategy != "ddp":
        mine, total = sharded_bytes(record)
        assert mine <= 0.6 * total
    kind = "model" if tuning == "full" else "adapter"
    assert record["proofs"][kind]["passed"]
    weights = root / "output" / kind
    assert any(weights.glob("*.safetensors"))
    return done.stdout


@pytest.mark.covers(method="sft", tuning="lora", world="fsdp", feature=["train", "eval"])
def test_fsdp_shards_and_learns_what_one_process_learns(alone: Callable[[str], list[float]], tmp_path: Path) -> None:
    log = check("fsdp", "lora", build(tmp_path), alone("lora"))
    assert "5 units" in log  # two blocks, the embedding, norm and head, the rest


@pytest.mark.covers(method="sft", tuning="full", world="zero3", feature=["train", "eval"])
def test_zero3_shards_and_learns_what_one_process_learns(alone: Callable[[str], list[float]], tmp_path: Path) -> None:
    # An odd number of questions: ranks would make different numbers of forward passes, and hang.
    check("zero3", "full", build(tmp_path), alone("full"), "eval.max_rows=11")


MATRIX = [
    pytest.param(
        strategy,
        tuning,
        marks=pytest.mark.covers(method="sft", tuning=tuning, world=strategy, feature=["train", "eval"]),
        id=f"{strategy}-{tuning}",
    )
    for strategy in ("ddp", "fsdp", "zero2", "zero3")
    for tuning in TUNING
    if not (tuning == "qlora" and strategy in ("fsdp", "zero3"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "tuning"), MATRIX)
def test_every_strategy_equals_one_process(
    strategy: str, tuning: str, alone: Callable[[str], list[float]], tmp_path: Path
) -> None:
    check(strategy, tuning, build(tmp_path), alone(tuning))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("training.gradient_checkpointing=true",),
        ("training.gradient_accumulation_steps=2", "training.per_device_train_batch_size=1"),
        ("training.optim=sgd", "training.neftune_noise_alpha=null", "lora.modules_to_save=[lm_head]"),
        ("training.bf16=true",),
    ],
    ids=["checkpointing", "accumulation", "sgd-saved-head", "bf16"],
)
def test_what_else_works_under_sharding(strategy: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    one = build(tmp_path / "one")
    single = [word.replace("size=1", "size=2") for word in overrides]
    done = train(one, *STEPS, *single)
    assert done.returncode == 0, done.stdout
    two = build(tmp_path / "two")
    done = train(two, *STEPS, *BOTH, f"resources.strategy={strategy}", *overrides, processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    bf16 = "training.bf16=true" in overrides
    # DeepSpeed keeps bfloat16 weights beside its float32 ones; autocast, as everywhere else, does not.
    assert losses(two) == pytest.approx(losses(one), rel=1e-2 if bf16 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_tied_embeddings_and_a_merge_under_sharding(strategy: str, tmp_path: Path) -> None:
    one, two, merged = (build(tmp_path / name, tied=True) for name in ("one", "two", "merged"))
    done = train(one, *STEPS, "lora=null")
    assert done.returncode == 0, done.stdout
    done = train(two, *STEPS, *BOTH, "lora=null", f"resources.strategy={strategy}", processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    done = train(merged, *STEPS, *BOTH, "output.merge=true", f"resources.strategy={strategy}", processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    assert run_record(merged)["proofs"]["merged"]["passed"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lora.quantize_base=true", "resources.strategy=fsdp"], ["4-bit weights cannot be sharded"]),
        (["lora.quantize_base=true", "resources.strategy=zero3"], ["4-bit weights cannot be sharded"]),
        (["training.optim=adafactor", "resources.strategy=zero2"], ["whole rows and columns", "adamw_torch"]),
        (["training.optim=adamw_bnb_8bit", "resources.strategy=fsdp"], ["blocks of state"]),
        (["lora.init_lora_weights=pissa", "resources.strategy=zero3"], ["takes the base weights apart", "zero2"]),
        (["model.added_tokens=[<a>]", "resources.strategy=fsdp"], ["single rows of the embedding"]),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_its_line(
    overrides: list[str], words: list[str], tmp_path: Path
) -> None:
    from blueprints.errors import RecipeError

    (tmp_path / "recipe.yaml").write_text(
        'method: sft\nmodel: "file:///m"\ndataset: "file:///d"\nlora: {}\nresources:\n  num_proc_per_node: 2\n'
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path / "recipe.yaml"), overrides=overrides)
    for word in words:
        assert word in str(caught.value)


def test_zero_without_deepspeed_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainers import sharding
    from trainers.process import World

    (tmp_path / "recipe.yaml").write_text(
        'method: sft\nmodel: "file:///m"\ndataset: "file:///d"\nresources: {num_proc_per_node: 2, strategy: zero2}\n'
    )
    recipe = load_recipe(str(tmp_path / "recipe.yaml")).recipe
    monkeypatch.setattr(sharding.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(EnvironmentFault, match="llm-blueprints\\[deepspeed\\]"):
        sharding.open_group(recipe, World(0, 2, 0, 2, launched=True))


def test_deepspeed_gets_our_settings_and_nothing_else(tmp_path: Path) -> None:
    from trainers import sharding
    from trainers.process import World

    (tmp_path / "recipe.yaml").write_text(
        'method: sft\nmodel: "file:///m"\ndataset: "file:///d"\nresources: {num_proc_per_node: 2, strategy: zero3}\n'
        "training: {per_device_train_batch_size: 3, gradient_accumulation_steps: 4, max_grad_norm: 0.7}\n"
    )
    recipe = load_recipe(str(tmp_path / "recipe.yaml")).recipe
    made = sharding.arguments(recipe, World(0, 2, 0, 2, launched=True), bf16=False)["deepspeed"]
    assert made["gradient_clipping"] == 0.7
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (3, 4)
    assert made["train_batch_size"] == 24
    assert made["bf16"] == {"enabled": False}
    assert made["zero_optimization"]["stage"] == 3
    assert "optimizer" not in made
    assert "scheduler" not in made
    assert not any("offload" in key for key in made["zero_optimization"])


ADOPT = "from trainers import process; process.adopt_mpi(); import os, json; print(json.dumps(dict(os.environ)))"


def adopted(root: Path, rank: int, **extra: str) -> subprocess.Popen[str]:
    """A process that was started as rank `rank` of two by Open MPI, as far as its environment says."""
    mpi = {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1234@1",
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", ADOPT], env=environment(root) | mpi | extra, text=True,
                            stdout=subprocess.PIPE)  # fmt: skip


def test_processes_of_mpirun_agree_on_where_to_meet(tmp_path: Path) -> None:
    # What a killed job has left behind is not taken for this job's address.
    stale = tmp_path / ".mpi-1234-1"
    stale.write_text("nowhere 1")
    os.utime(stale, (time.time() - 1000, time.time() - 1000))
    second = adopted(tmp_path, 1)
    time.sleep(0.5)
    first = adopted(tmp_path, 0)
    found = [json.loads(process.communicate(timeout=60)[0]) for process in (first, second)]
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        assert found[0][name] == found[1][name]
    assert found[0]["MASTER_ADDR"] == "127.0.0.1"
    assert [env["RANK"] for env in found] == ["0", "1"]
    assert all((env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "2") for env in found)
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1"]


def test_the_environments_address_goes_first_under_mpirun(tmp_path: Path) -> None:
    found = json.loads(adopted(tmp_path, 1, MASTER_ADDR="10.0.0.7").communicate(timeout=60)[0])
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.7", "29500")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(strategy, marks=pytest.mark.covers(method="sft", tuning="lora", world="mpi", feature=["train"]))
     for strategy in ("ddp", "zero2")],
)  # fmt: skip
def test_under_mpirun(strategy: str, alone: Callable[[str], list[float]], tmp_path: Path) -> None:
    root = build(tmp_path)
    worker = command(root, *STEPS, *BOTH, f"resources.strategy={strategy}")
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *worker], env=environment(root), cwd=root,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert losses(root) == pytest.approx(alone("lora"), rel=RTOL[strategy])
    assert run_record(root)["effective"]["world size"] == "2"
    assert not list(root.glob(".mpi-*"))
