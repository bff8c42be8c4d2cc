"""Fine-tune any Hugging Face language model from one recipe, on this machine or as a Kubeflow TrainJob.

Public names are imported on first use, so that `import blueprints` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blueprints.client import (
        BuiltinTrainer,
        DatasetInitializer,
        Initializer,
        ModelInitializer,
        TrainerClient,
    )
    from blueprints.custom_trainer import CustomTrainer, CustomTrainerContainer
    from blueprints.errors import (
        BlueprintError,
        DataError,
        EnvironmentFault,
        ExitCode,
        Fault,
        JobFailedError,
        ManifestError,
        RecipeError,
        RowsError,
        UsageError,
    )
    from blueprints.recipe import LoadedRecipe, Origin, ShippedRecipe, load_recipe, overrides_between, shipped_recipes
    from blueprints.recipe.schema import (
        CustomConfig,
        DatasetConfig,
        DistillConfig,
        DistillOptions,
        DPOConfig,
        DPOOptions,
        EnvSource,
        EvalConfig,
        GRPOConfig,
        GRPOOptions,
        KeyRef,
        LoraConfig,
        ModelConfig,
        OutputConfig,
        PPOConfig,
        PPOOptions,
        QATConfig,
        QATOptions,
        Recipe,
        ResourcesConfig,
        RewardFunction,
        RuntimeConfig,
        SFTConfig,
        SFTOptions,
        Toleration,
        TrainingConfig,
        Volume,
    )
    from blueprints.sdk import sdk_arguments
    from blueprints.types import Event, Runtime, Step, TrainJob

_HOMES = {
    "blueprints.client": ("BuiltinTrainer", "DatasetInitializer", "Initializer", "ModelInitializer", "TrainerClient"),
    "blueprints.custom_trainer": ("CustomTrainer", "CustomTrainerContainer"),
    "blueprints.errors": (
        "BlueprintError", "DataError", "EnvironmentFault", "ExitCode", "Fault", "JobFailedError", "ManifestError",
        "RecipeError", "RowsError", "UsageError",
    ),
    "blueprints.recipe": (
        "LoadedRecipe", "Origin", "ShippedRecipe", "load_recipe", "overrides_between", "shipped_recipes",
    ),
    "blueprints.recipe.schema": (
        "CustomConfig", "DPOConfig", "DPOOptions", "DatasetConfig", "DistillConfig", "DistillOptions", "EnvSource",
        "EvalConfig", "GRPOConfig", "GRPOOptions", "KeyRef", "LoraConfig", "ModelConfig", "OutputConfig", "PPOConfig", "PPOOptions", "QATConfig",
        "QATOptions", "Recipe", "ResourcesConfig", "RewardFunction", "RuntimeConfig", "SFTConfig", "SFTOptions",
        "Toleration", "TrainingConfig", "Volume",
    ),
    "blueprints.sdk": ("sdk_arguments",),
    "blueprints.types": ("Event", "Runtime", "Step", "TrainJob"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - grouped as a reader looks for them
    "TrainerClient", "BuiltinTrainer", "CustomTrainer", "CustomTrainerContainer", "Initializer", "DatasetInitializer", "ModelInitializer",
    "TrainJob", "Step", "Event", "Runtime",
    "SFTConfig", "DPOConfig", "PPOConfig", "GRPOConfig", "DistillConfig", "QATConfig", "CustomConfig",
    "ModelConfig", "DatasetConfig", "LoraConfig", "TrainingConfig", "EvalConfig", "OutputConfig", "ResourcesConfig",
    "RuntimeConfig", "EnvSource", "KeyRef", "Toleration", "Volume", "RewardFunction",
    "SFTOptions", "DPOOptions", "PPOOptions", "GRPOOptions", "DistillOptions", "QATOptions",
    "Recipe", "LoadedRecipe", "Origin", "ShippedRecipe", "load_recipe", "overrides_between", "shipped_recipes",
    "sdk_arguments",
    "BlueprintError", "UsageError", "RecipeError", "ManifestError", "DataError", "RowsError", "JobFailedError",
    "EnvironmentFault", "Fault", "ExitCode",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'blueprints' has no attribute {name!r}")
    value = vars(importlib.import_module(module))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
