"""Going on from an earlier adapter (`lora.from`): what it is must agree with the recipe; then training starts from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from blueprints.errors import DataError, JobFailedError, UsageError
from blueprints.recipe import LoadedRecipe
from blueprints.recipe.schema import Recipe
from trainers.adapter_state import adapter_state

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DECIDED = (
    "r", "lora_alpha", "use_rslora", "use_dora", "bias", "target_modules", "target_parameters", "exclude_modules",
    "modules_to_save", "layers_to_transform", "rank_pattern", "alpha_pattern",
)  # fmt: skip
"""Keys of the block `lora` that an adapter has been made with, by PEFT's names."""
FOREIGN = ("alora_invocation_tokens", "fan_in_fan_out", "layer_replication", "lora_bias", "use_qalora")
"""What PEFT's adapters may have beyond the recipe's grammar."""
FETCH_AGAIN = "run the model initializer again with this recipe"


def effective(loaded: LoadedRecipe, directory: Path) -> Recipe:
    """The recipe with what the adapter of `lora.from` decides: rank, scale, layers.

    Args:
        directory: the adapter in the workspace.

    Raises:
        DataError: there is no LoRA adapter.
        UsageError: the recipe sets something that the adapter is not.
    """
    recipe = loaded.recipe
    if recipe.lora is None or recipe.lora.from_uri is None:
        return recipe
    config = _read(directory)
    where = f"lora.from={recipe.lora.from_uri}"
    asked, own = dict(recipe.lora), {key: config.get(key) for key in DECIDED}
    differ = [
        f"lora.{key} is {_shown(asked[key])} in the recipe ({loaded.origins[f'lora.{key}']}) and {_shown(own[key])} in "
        "the adapter"
        for key in DECIDED
        if key != "target_modules" and _is_set(loaded, f"lora.{key}") and _plain(asked[key]) != _plain(own[key])
    ]
    if differ:
        raise UsageError(
            "; ".join(differ),
            where=where,
            todo="leave these keys out (`key=null` unsets one of a recipe): the adapter brings its own",
        )
    tokens, added = config.get("trainable_token_indices"), recipe.model.added_tokens
    if bool(tokens) != bool(added) and not (added and own["modules_to_save"]):
        raise UsageError(
            "the adapter was trained with added tokens, the recipe has none"
            if tokens
            else "the recipe adds tokens, the adapter was trained without them",
            where=f"model.added_tokens with {where}",
            todo="set model.added_tokens as in the earlier run",
        )
    if not _is_set(loaded, "lora.lora_dropout"):
        own["lora_dropout"] = float(config.get("lora_dropout") or 0.0)
    own |= {key: own[key] or {} for key in ("rank_pattern", "alpha_pattern")}
    return recipe.model_copy(update={"lora": recipe.lora.model_copy(update=own)})


def _read(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"no adapter is there: {error}", where=str(directory / CONFIG), todo=FETCH_AGAIN) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else "nothing"
        raise DataError(f"found {kind}, no LoRA adapter", where=str(directory / CONFIG), todo="name a LoRA adapter")
    foreign = [key for key in FOREIGN if config.get(key)]
    if config.get("init_lora_weights") not in (True, False, None, "gaussian", "orthogonal"):
        # Loading it would take it out of the base weights once more.
        foreign.append(f"init_lora_weights={config['init_lora_weights']}")
    if foreign:
        raise DataError(
            f"the adapter was made with {', '.join(foreign)}, which cannot be gone on from",
            where=str(directory / CONFIG),
            todo="merge it into its base with PEFT and train a new adapter on that",
        )
    if not (directory / WEIGHTS).is_file():
        raise DataError(f"the adapter has no {WEIGHTS}", where=str(directory), todo="save it as safetensors with PEFT")
    return config


def _is_set(loaded: LoadedRecipe, key: str) -> bool:
    return loaded.origins[key].layer not in ("default", "derived")


def _plain(value: Any) -> Any:
    """Lists as sets, and nothing for whatever says nothing."""
    if isinstance(value, list):
        return sorted(value, key=str) or None
    return value or None


def _shown(value: Any) -> str:
    return json.dumps(value) if value is not None else "not set"


def load(model: PreTrainedModel, loaded: LoadedRecipe, recipe: Recipe, directory: Path) -> PeftModel:
    """`model` with the adapter in `directory`, to be trained on.

    Args:
        loaded: the recipe as it was given.
        recipe: the one `effective` returned.

    Raises:
        DataError: the adapter is of another model, or not whole.
        UsageError: the recipe names other layers than the adapter has.
    """
    lora, asked = recipe.lora, loaded.recipe.lora
    assert lora is not None
    assert asked is not None
    if _is_set(loaded, "lora.target_modules"):
        wanted, own = (_layers(model, targets) for targets in (asked.target_modules, lora.target_modules))
        if wanted != own:
            only = sorted(wanted ^ own)
            raise UsageError(
                f"lora.target_modules ({loaded.origins['lora.target_modules']}) and the adapter differ on "
                f"{len(only)} layers, such as {', '.join(only[:3])}",
                where=f"lora.from={lora.from_uri}",
                todo="leave lora.target_modules out (`lora.target_modules=null`): the adapter brings its own",
            )
    quantised = lora.quantize_base
    config = PeftLoraConfig.from_pretrained(str(directory))
    config.lora_dropout = lora.lora_dropout
    try:
        adapted = PeftModel.from_pretrained(
            model, str(directory), config=config, is_trainable=True, autocast_adapter_dtype=not quantised
        )
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f"the adapter does not fit the model: {' '.join(str(error).split())[:300]}",
            where=f"lora.from={lora.from_uri}",
            todo="name the model that the adapter was trained on as `model`",
        ) from error
    _check_whole(adapted, directory)
    return adapted


def _layers(model: nn.Module, targets: str | list[str]) -> set[str]:
    """The layers of `model` that `targets` names."""
    from trainers.peft import linear_layers

    if targets == "all-linear":
        return set(linear_layers(model))
    config = PeftLoraConfig(target_modules=targets)
    return {name for name, _ in model.named_modules() if name and check_target_module_exists(config, name)}


def _check_whole(model: PeftModel, directory: Path) -> None:
    saved, wanted = set(load_file(directory / WEIGHTS)), set(adapter_state(model))
    missing, unexpected = sorted(wanted - saved), sorted(saved - wanted)
    if missing or unexpected:
        names = ", ".join((missing + unexpected)[:3])
        raise DataError(
            f"the adapter lacks {len(missing)} weights that its configuration names and has {len(unexpected)} that the "
            f"model has no place for ({names})",
            where=str(directory / WEIGHTS),
            todo="name the model that the adapter was trained on as `model`",
        )


def check_start(model: nn.Module, recipe: Recipe, directory: Path) -> str:
    """Assert that the model about to be trained carries the weights of `lora.from`.

    Returns:
        a line for the effective settings.

    Raises:
        JobFailedError: the method has made an adapter of its own.
    """
    lora = recipe.lora
    assert lora is not None
    saved = load_file(directory / WEIGHTS)
    live: Mapping[str, torch.Tensor] = adapter_state(model) if isinstance(model, PeftModel) else {}
    if any(name not in live or not torch.equal(live[name].cpu(), saved[name].to(live[name].dtype)) for name in saved):
        raise JobFailedError(
            "the model does not start from the adapter of lora.from",
            where=f"method {recipe.method}",
            todo="a method of your own starts from it with `trainers.peft.with_adapter`",
        )
    return f"{lora.from_uri} ({len(saved)} tensors)"
