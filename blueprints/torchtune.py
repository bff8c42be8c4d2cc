"""What the control plane makes of a trainer whose command is exactly `tune run`: torchtune's recipe and configuration.

Our own runtimes never use it. It is here because `resolve` shows what a cluster makes of any TrainJob.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ENTRYPOINT = ["tune", "run"]
MODELS = ("llama3_2/1B", "llama3_2/3B", "llama3_3/70B", "qwen2_5/1.5B")
MANAGED = ("output_dir", "tokenizer.path", "checkpointer.checkpoint_dir", "tokenizer.merges_file")
"""Settings that come from the runtime's command alone."""


def applies(trainer: dict[str, Any]) -> bool:
    """Whether the control plane takes this trainer for torchtune."""
    return trainer.get("command") == ENTRYPOINT


def model_of(runtime: str) -> str:
    """The model that a runtime's name stands for: `torchtune-llama3.2-1b` is `llama3_2/1B`; empty if it has not three
    parts."""
    parts = runtime.split("-")
    return f"{parts[1].replace('.', '_')}/{parts[2].upper()}" if len(parts) == 3 else ""


def recipe_and_config(
    args: Sequence[str], runtime: str, *, nodes: int, processes: int | None, gpus: int
) -> tuple[str, str]:
    """torchtune's recipe and configuration for these arguments.

    Args:
        args: the trainer's arguments.
        runtime: the runtime's name.
        nodes: number of nodes.
        processes: processes per node; None: one per GPU.
        gpus: GPUs per node.
    """
    lora, qlora = uses_lora(args), uses_qlora(args)
    one_device = nodes == 1 and (processes == 1 or gpus == 1)
    if one_device:
        kind = "qlora" if qlora else "lora" if lora else "full"
        recipe = "full_finetune_single_device" if kind == "full" else "lora_finetune_single_device"
        suffix = f"_{kind}_single_device"
    elif nodes == 1 and (lora or qlora):
        recipe, suffix = "lora_finetune_distributed", "_qlora" if qlora else "_lora"
    else:
        recipe, suffix = "full_finetune_distributed", "_full_multinode" if nodes > 1 else "_full"
    return recipe, model_of(runtime) + suffix


def command(
    trainer: dict[str, Any],
    runtime: str,
    runtime_command: Sequence[str],
    *,
    nodes: int,
    processes: int | None,
    gpus: int,
    endpoint: str,
) -> list[str]:
    """The command as the control plane writes it; the trainer's arguments stay as they are.

    Args:
        trainer: `spec.trainer`.
        runtime: the runtime's name.
        runtime_command: the command of the runtime's container, of which only `MANAGED` settings are kept.
        nodes, processes, gpus: see `recipe_and_config`.
        endpoint: address and port of the first node.
    """
    recipe, config = recipe_and_config(
        trainer.get("args") or [], runtime, nodes=nodes, processes=processes, gpus=gpus
    )  # fmt: skip
    several = nodes > 1 or (processes or 0) > 1 or (processes is None and gpus > 1)
    rendezvous = [f"--rdzv_endpoint={endpoint}"] if several else []
    kept = [word for word in runtime_command if word.partition("=")[0] in MANAGED]
    return [*ENTRYPOINT, *rendezvous, recipe, "--config", config, *kept]


def uses_lora(args: Sequence[str]) -> bool:
    """Whether the arguments name LoRA's modules."""
    return any("model.lora_attn_modules" in argument for argument in args)


def uses_qlora(args: Sequence[str]) -> bool:
    """Whether the base is to be quantised; with DoRA it is not."""
    return not _on(args, "model.use_dora") and _on(args, "model.quantize_base")


def _on(args: Sequence[str], key: str) -> bool:
    pairs = [argument.partition("=") for argument in args if "=" in argument]
    return any(key in name and value.strip().lower() == "true" for name, _, value in pairs)
