"""How the processes of a run share one model: DDP, PyTorch's fully_shard (FSDP2), DeepSpeed ZeRO-2 and ZeRO-3.

All are chosen in the process, from `resources.strategy`, and go through Transformers' Trainer. What is really in effect
is measured once the model is wrapped (`sharding_settings`): a strategy that silently trains as another stops the run.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from blueprints.errors import EnvironmentFault
from blueprints.recipe.schema import Recipe
from trainers.process import World, forget_mpi
from trainers.settings import Setting
from trainers.watch import WATCH

ZERO_STAGES = {"zero2": 2, "zero3": 3}
SHARDS = "shards"
"""Directory of a checkpoint that holds what FSDP has sharded: every rank writes its own part."""
GROUP_TIMEOUT = 3
"""The process group gives up after this many `training.ddp_timeout`: the watch (`trainers.watch`) speaks first."""


def chosen(recipe: Recipe, world: World) -> str:
    """The strategy in effect: `resources.strategy`, where `auto` is ddp; alone for one process without a launcher."""
    if recipe.resources.strategy in ZERO_STAGES or recipe.resources.strategy == "fsdp":
        return recipe.resources.strategy
    return "ddp" if world.launched else "alone"


def open_group(recipe: Recipe, world: World) -> None:
    """Connect the processes; nothing to do for one that was started alone.

    Raises:
        EnvironmentFault: DeepSpeed is asked for and not installed.
    """
    strategy = chosen(recipe, world)
    on_cpu = recipe.resources.gpu == 0
    if strategy in ZERO_STAGES and importlib.util.find_spec("deepspeed") is None:
        raise EnvironmentFault(
            f"{strategy} needs DeepSpeed, which is not installed",
            where="resources.strategy",
            todo="pip install 'llm-blueprints[deepspeed]', or set resources.strategy=fsdp",
        )
    if not world.launched:
        return
    device = None if on_cpu else torch.device("cuda", world.local_rank)
    if device is not None:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=GROUP_TIMEOUT * recipe.training.ddp_timeout)
    store = _meet_after_restarts(world, timeout)
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
        timeout=timeout,
        device_id=device,
        **({"store": store, "rank": world.rank, "world_size": world.size} if store else {}),
    )
    forget_mpi()
    WATCH.start(world, recipe.training.ddp_timeout)
    if strategy in ZERO_STAGES:
        _open_deepspeed("gloo" if on_cpu else "nccl")


def _meet_after_restarts(world: World, timeout: timedelta) -> torch.distributed.TCPStore | None:
    """The store in which the processes of several nodes meet when torchrun may start them again.

    torchrun's workers meet under the number of restarts that their own node counts. After a node was lost the counts
    differ, and they would wait for each other for ever. Here rank 0 opens a store of its own and leaves its address in
    torchrun's; the others try until a rank 0 answers that waits for them, as a dead or dying one does not.

    Returns:
        None where torchrun starts nothing again, or on one node: its own way is sound there.
    """
    env = os.environ
    if env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or env.get("GROUP_WORLD_SIZE", "1") == "1":
        return None
    host, address = env["MASTER_ADDR"], "blueprints-rank-0"
    board = torch.distributed.TCPStore(
        host, int(env["MASTER_PORT"]), is_master=False, timeout=timeout, wait_for_workers=False
    )
    others = [f"here-{rank}" for rank in range(1, world.size)]
    if world.main:
        store = torch.distributed.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        board.set(address, str(store.port))
        store.wait(others, timeout)
        store.set("all", "here")
    else:
        store = _join(board, address, host, others[world.rank - 1], timeout)
    # The watch meets in the same place.
    env["MASTER_PORT"], env["TORCHELASTIC_RESTART_COUNT"] = str(store.port), "0"
    return store


def _join(board: Any, address: str, host: str, mine: str, timeout: timedelta) -> torch.distributed.TCPStore:
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        port = int(board.get(address))
        try:
            store = torch.distributed.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
            )
            store.set(mine, "")
            store.wait(["all"], timedelta(seconds=20))
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            store.set_timeout(timeout)
            return store


def _open_deepspeed(backend: str) -> None:
    """Make DeepSpeed use the group that is there; ZeRO-3 partitions weights while they are loaded."""
    import deepspeed

    # On CPU it would compile an all-reduce over shared memory first: minutes and a compiler for nothing used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def close_group() -> None:
    """Let all processes arrive, then disconnect: under mpirun the first to leave would take the others with it."""
    WATCH.stop()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@contextmanager
def loaded_whole(args: TrainingArguments) -> Iterator[None]:
    """Models loaded inside are whole on every rank.

    Under ZeRO-3 Transformers partitions every model it loads, and one that is not trained, such as a teacher, would never
    be put together again.
    """
    config = args.hf_deepspeed_config if args.deepspeed else None
    if config is None or not config.is_zero3():
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


@contextmanager
def put_together(model: nn.Module) -> Iterator[None]:
    """For forward passes before training: a model that ZeRO-3 has partitioned while it was loaded is whole inside."""
    parameters = list(model.parameters())
    if not any("ds_numel" in vars(parameter) for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield


def arguments(recipe: Recipe, world: World, bf16: bool) -> dict[str, Any]:
    """Transformers' TrainingArguments that make the strategy."""
    strategy = chosen(recipe, world)
    if strategy == "fsdp":
        return {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",  # each block by itself, then the rest
                "reshard_after_forward": True,
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        }
    if strategy in ZERO_STAGES:
        return {"deepspeed": deepspeed_config(recipe, world, ZERO_STAGES[strategy], bf16=bf16)}
    return {}


def deepspeed_config(recipe: Recipe, world: World, stage: int, *, bf16: bool) -> dict[str, Any]:
    """DeepSpeed's configuration: it shards and communicates. Optimizer and schedule are the recipe's, made by
    Transformers as for any other strategy; nothing is offloaded."""
    training = recipe.training
    batch = training.per_device_train_batch_size
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": recipe.resources.gpu > 0}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "train_batch_size": batch * training.gradient_accumulation_steps * world.size,
        "gradient_clipping": training.max_grad_norm,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any optimizer that works element by element; rules refuse the others
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def fsdp_everywhere(trainer: Trainer) -> None:
    """Make Accelerate shard on CPU as well, and compute as without sharding.

    Accelerate takes a request for FSDP on accelerators alone; on CPU it would train with DDP and say nothing. Its code
    for FSDP2 works on any device.
    """
    state = trainer.accelerator.state
    if trainer.args.fsdp_plugin_args is None:
        return
    if state.distributed_type != DistributedType.FSDP:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP  # which every later look at the state starts from
        trainer.is_fsdp_enabled = True
    # Norms and residuals in bfloat16 would make another model of it than autocast does on one process.
    state.fsdp_plugin.mixed_precision_policy = None


def wrapped(trainer: Trainer) -> None:
    """What is missing to a model that Accelerate has sharded: mixed precision, and that generation makes as many
    forward passes on every rank."""
    if not trainer.is_fsdp_enabled:
        return
    model = trainer.model
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part._is_fsdp_managed_module = True  # as Transformers marks models it has sharded itself
    if trainer.args.bf16:
        model.forward = torch.autocast(trainer.args.device.type, dtype=torch.bfloat16)(model.forward)


def synced(strategy: str) -> bool:
    """Whether a forward pass is a matter of all ranks: none may make more of them than the others."""
    return strategy in ("fsdp", "zero3")


@dataclass(frozen=True)
class Shares:
    """What of the model one rank holds.

    Attributes:
        what: what is divided among the ranks, in words.
        mine: bytes of it on this rank.
        total: bytes of it over all ranks.
        units: modules that are sharded each by itself.
        whole: names of parameters that should be divided and are not.
    """

    what: str
    mine: int
    total: int
    units: int
    whole: tuple[str, ...] = ()


def sharding_settings(trainer: Trainer, strategy: str, world: World) -> list[Setting]:
    """Lines of the effective settings on how the processes share the model, measured on the wrapped model."""
    wrapped = trainer.model_wrapped
    seen = _seen(trainer, wrapped)
    lines = [Setting("strategy", strategy, seen, seen == strategy)]
    shares = _shares(trainer, seen)
    if shares is None:
        return lines
    divided = shares.mine < shares.total and not shares.whole
    text = f"{shares.what}: {shares.mine:,} of {shares.total:,} bytes on rank {world.rank}"
    if shares.units:
        text += f", {shares.units} units"
    if shares.whole:
        text += f"; not sharded: {', '.join(shares.whole[:3])}"
    asked = "less than all on each rank" if not divided else ""
    return [*lines, Setting("sharded", asked, text, divided or world.size == 1)]


def _seen(trainer: Trainer, wrapped: nn.Module) -> str:
    """What the wrapped model says of itself, whatever was asked for."""
    if trainer.is_deepspeed_enabled:
        stage = int(wrapped.zero_optimization_stage())
        return f"zero{stage}"
    if isinstance(wrapped, DistributedDataParallel):
        return "ddp"
    return "fsdp" if isinstance(wrapped, FSDPModule) else "alone"


def _shares(trainer: Trainer, seen: str) -> Shares | None:
    if seen == "fsdp":
        named = list(trainer.model.named_parameters())
        return Shares(
            "weights",
            sum(p.to_local().nbytes for _, p in named if isinstance(p, DTensor)),
            sum(p.numel() * p.element_size() for _, p in named),
            sum(isinstance(module, FSDPModule) for module in trainer.model.modules()),
            tuple(name for name, p in named if not isinstance(p, DTensor)),
        )
    if seen == "zero3":
        named = list(trainer.model.named_parameters())
        return Shares(
            "weights",
            sum(p.ds_tensor.nbytes for _, p in named),
            sum(p.ds_numel * p.element_size() for _, p in named),
            0,
        )
    if seen == "zero2":
        optimizer = trainer.model_wrapped.optimizer
        total = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        mine = sum(part.numel() for part in optimizer.single_partition_of_fp32_groups)
        return Shares("optimizer state, in float32", 8 * mine, 8 * total, 0)
    return None


def whole_state(model: nn.Module, strategy: str) -> dict[str, torch.Tensor] | None:
    """The trained weights of a sharded model, whole, on the CPU of rank 0; of an adapter the adapter's alone.

    To be called on all ranks.

    Returns:
        weights by name on rank 0, empty elsewhere; None where every rank holds the whole model anyway.
    """
    adapter = isinstance(model, PeftModel)
    if strategy == "fsdp":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
        return get_model_state_dict(model, options=options)
    if strategy == "zero3":
        return _gathered(model, adapter)
    return None


def _gathered(model: nn.Module, trained_only: bool) -> dict[str, torch.Tensor]:
    import deepspeed

    main = torch.distributed.get_rank() == 0
    found = {}
    for name, parameter in model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            if main:
                found[name] = parameter.detach().cpu().clone()
    if main:
        kept = model.state_dict().keys() - dict(model.named_parameters()).keys()
        found |= {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in kept}
    return found


def save_shards(trainer: Trainer, directory: Path) -> None:
    """Every rank writes its part of the trained weights and of the optimizer's state (FSDP)."""
    checkpoint.save(_shard_state(trainer), checkpoint_id=directory / SHARDS)


def load_shards(trainer: Trainer, directory: Path) -> None:
    """Take up what `save_shards` has written."""
    state = _shard_state(trainer)
    checkpoint.load(state, checkpoint_id=directory / SHARDS)
    set_state_dict(
        trainer.model,
        trainer.optimizer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(ignore_frozen_params=True, strict=False),
    )


def _shard_state(trainer: Trainer) -> dict[str, Any]:
    options = StateDictOptions(ignore_frozen_params=True)
    weights, optimizer = get_state_dict(trainer.model, trainer.optimizer.optimizer, options=options)
    return {"model": weights, "optimizer": optimizer}
