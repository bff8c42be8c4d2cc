"""What saves memory, held against what is: the optimizer's state, Liger's kernels, offloaded activations."""

from __future__ import annotations

import importlib.util
from types import MethodType

import torch
from torch import nn
from torch.optim import Optimizer

from blueprints.errors import EnvironmentFault, JobFailedError, UsageError
from blueprints.recipe.schema import Recipe

EIGHT_BIT_FROM = 4096
"""Smallest weight whose optimizer state bitsandbytes keeps in 8 bits."""
PAGED_FROM = 100_000
"""Smallest weight whose optimizer state bitsandbytes can page out."""
CLASSES = {"adamw": "AdamW", "lion": "Lion", "adafactor": "Adafactor", "sgd": "SGD"}
"""What the class of an optimizer is called, by a part of its name."""


def check_installed(recipe: Recipe, model: nn.Module) -> None:
    """Liger and bitsandbytes are there where the recipe asks for them, and Liger knows the model.

    Raises:
        EnvironmentFault: a package is missing.
        UsageError: Liger has no kernels for this architecture.
    """
    training = recipe.training
    wanted = {
        "training.use_liger_kernel=true": "liger_kernel" if training.use_liger_kernel else "",
        f"training.optim={training.optim}": "bitsandbytes" if _by_bitsandbytes(training.optim) else "",
    }
    for key, package in wanted.items():
        if package and importlib.util.find_spec(package) is None:
            raise EnvironmentFault(
                f"{key} needs {package}, which is not installed",
                where=key.partition("=")[0],
                todo=f"pip install {package.replace('_', '-')}, or leave {key.partition('=')[0]} out",
            )
    if training.use_liger_kernel:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        kind = model.config.get_text_config().model_type
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN and model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise UsageError(
                f"Liger has no kernels for the architecture {kind}",
                where="training.use_liger_kernel",
                todo="set training.use_liger_kernel=false",
            )


def _by_bitsandbytes(optim: str) -> bool:
    return "8bit" in optim or "lion" in optim or "paged" in optim


def liger_modules(model: nn.Module) -> int:
    """Modules that compute by Liger's kernels."""
    forwards = [module.forward for module in model.modules()]
    return sum(isinstance(one, MethodType) and one.__module__.startswith("liger_kernel") for one in forwards)


def check_optimizer(asked: str, optimizer: Optimizer, model: nn.Module) -> str:
    """Hold the optimizer's state after a step against the one that was asked for.

    Args:
        asked: `training.optim`.
        optimizer: after its first step, without Accelerate's wrapper.
        model: whose embeddings keep states of 32 bits, as Transformers has it.

    Returns:
        a line that says what the state is.

    Raises:
        JobFailedError: it is another kind of optimizer or of state.
    """
    kind, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if package == "deepspeed":
        return f"{kind}, kept by DeepSpeed"
    name = next(value for key, value in CLASSES.items() if key in asked)
    moments = [
        (weight, moment)
        for weight, kept in optimizer.state.items()
        for moment in kept.values()
        if isinstance(moment, torch.Tensor) and moment.shape == weight.shape and moment.dim()
    ]
    exempt = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    due = sum(weight.numel() >= EIGHT_BIT_FROM and id(weight) not in exempt for weight, _ in moments)
    due, small = due if "8bit" in asked else 0, sum(moment.dtype == torch.uint8 for _, moment in moments)
    size = sum(moment.numel() * moment.element_size() for _, moment in moments)
    seen = f"{package} {kind}, state of {size:,} bytes, {small} of {len(moments)} tensors in 8 bits"
    right = kind == name and package == _package(asked) and small == due
    if asked == "adamw_torch_fused":
        right = right and all(group["fused"] for group in optimizer.param_groups)
    if asked.startswith("paged_"):
        pages = len(optimizer.page_mng.paged_tensors)
        right = right and pages == sum(weight.numel() >= PAGED_FROM for weight, _ in moments)
        seen += f", {pages} paged"
    if not right:
        raise JobFailedError(
            f"the optimizer is not as asked: training.optim={asked}, in effect {seen}",
            where="first step",
            todo="this is a fault of llm-blueprints: please report it",
        )
    if "8bit" in asked and not due:
        seen += f": no trained weight has {EIGHT_BIT_FROM:,} values or more, so 8 bits save nothing here"
    return seen


def _package(optim: str) -> str:
    return "bitsandbytes" if _by_bitsandbytes(optim) else "transformers" if optim == "adafactor" else "torch"
