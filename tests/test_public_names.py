"""The public names of `blueprints`, and what importing it costs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import blueprints

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = {
    # running jobs, with the names of the Kubeflow SDK
    "TrainerClient", "BuiltinTrainer", "CustomTrainer", "CustomTrainerContainer", "Initializer", "DatasetInitializer", "ModelInitializer",
    "TrainJob", "Step", "Event", "Runtime",
    # configurations, one per method, and their blocks
    "SFTConfig", "DPOConfig", "PPOConfig", "GRPOConfig", "DistillConfig", "QATConfig", "CustomConfig",
    "ModelConfig", "DatasetConfig", "LoraConfig", "TrainingConfig", "EvalConfig", "OutputConfig", "ResourcesConfig",
    "RuntimeConfig", "EnvSource", "KeyRef", "Toleration", "Volume", "RewardFunction",
    "SFTOptions", "DPOOptions", "PPOOptions", "GRPOOptions", "DistillOptions", "QATOptions",
    # recipes
    "Recipe", "LoadedRecipe", "Origin", "ShippedRecipe", "load_recipe", "overrides_between", "shipped_recipes",
    "sdk_arguments",
    # errors
    "BlueprintError", "UsageError", "RecipeError", "ManifestError", "DataError", "RowsError", "JobFailedError",
    "EnvironmentFault", "Fault", "ExitCode",
    "__version__",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(blueprints.__all__) == PUBLIC
    assert len(blueprints.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = vars(blueprints).get(name) or blueprints.__getattr__(name)
    assert value is not None
    if not isinstance(value, str):
        assert value.__doc__
    assert name in dir(blueprints)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'SFTConfg'"):
        _ = blueprints.SFTConfg


def test_type_checkers_see_the_names_that_are_there_at_run_time() -> None:
    """The imports under TYPE_CHECKING and the lazy ones are two lists of the same."""
    source = Path(blueprints.__file__).read_text(encoding="utf-8")
    lazy = {name: module for module, names in blueprints._HOMES.items() for name in names}
    assert set(lazy) | {"__version__"} == PUBLIC
    static = source.partition("if TYPE_CHECKING:")[2].partition("_HOMES")[0]
    for name, module in lazy.items():
        assert f"from {module} import" in static
        assert name in static.split(f"from {module} import")[1].split("from ")[0]
        assert name in vars(importlib.import_module(module))


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("module", ["blueprints", "blueprints.cli", "blueprints.cli.arguments"])
def test_nothing_heavy_is_imported(module: str) -> None:
    heavy = ("torch", "transformers", "numpy", "pyarrow", "pydantic", "yaml", "rich", "kubernetes")
    found = python(f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])")
    assert found == "[]"


def test_recipes_need_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "numpy", "pyarrow", "datasets", "kubernetes", "rich")
    code = f"import sys, blueprints; blueprints.load_recipe('sft'); print([n for n in {heavy} if n in sys.modules])"
    assert python(code) == "[]"


def test_the_example_of_the_design() -> None:
    config = blueprints.SFTConfig(
        lora=blueprints.LoraConfig(r=4),
        training=blueprints.TrainingConfig(num_train_epochs=2),
        sft=blueprints.SFTOptions(packing=True),
        resources=blueprints.ResourcesConfig(num_nodes=2),
    )
    assert config.lora is not None
    assert (config.lora.r, config.resources.num_nodes) == (4, 2)
