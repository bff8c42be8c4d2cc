"""The adapter: PEFT's LoraConfig from the recipe, with every named layer checked against the model."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from blueprints.errors import UsageError
from blueprints.recipe.schema import LoraConfig
from trainers import earlier_adapter
from trainers.adapter_state import adapter_state
from trainers.model import elements, new_tokens

if TYPE_CHECKING:
    from trainers.run import Run

LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""PEFT's rule for the index of the layer a module belongs to: the first numbered part of its name."""
ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, Conv1D)
"""Kinds of layers that can carry a LoRA adapter."""
EXPERTS_DIMENSIONS = 3
"""Experts kept as one weight: experts × out × in."""


def with_adapter(run: Run, model: PreTrainedModel) -> tuple[PreTrainedModel | PeftModel, PeftLoraConfig | None]:
    """What TRL's trainers take as `model` and `peft_config`.

    Returns:
        the model with the adapter of `lora.from` and None; or the model as it is, and the configuration of the new
        adapter (None without `lora`).

    Raises:
        UsageError: see `adapter_config`; the recipe and the adapter of `lora.from` differ.
        DataError: the adapter of `lora.from` is none, or of another model.
    """
    lora = run.recipe.lora
    if lora is None:
        return model, None
    if lora.from_uri is not None:
        return earlier_adapter.load(model, run.loaded, run.recipe, run.where.root / "adapter"), None
    return model, adapter_config(lora, model, new_tokens(run.where.model, run.recipe))


def adapter_config(lora: LoraConfig, model: PreTrainedModel, tokens: Sequence[int] = ()) -> PeftLoraConfig:
    """The PEFT configuration of `lora` for `model`.

    Args:
        tokens: ids of added tokens: their rows of the embeddings are trained too.

    Raises:
        UsageError: a layer, a pattern or a layer index the recipe names is not in the model, or would have no effect.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    _check_names(lora, modules)
    _check_layers(lora.layers_to_transform, modules)
    head = _head_name(model)
    if _matches(lora.target_modules, head) and lora.target_modules != "all-linear":
        raise UsageError(
            f"{head!r} cannot carry an adapter: the loss is computed from its weight directly",
            where="lora.target_modules",
            todo=f"train it whole instead: lora.modules_to_save=[{head}]",
        )
    config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.lora_alpha or 2 * lora.r,
        lora_dropout=lora.lora_dropout,
        target_modules=lora.target_modules,
        exclude_modules=lora.exclude_modules,
        modules_to_save=lora.modules_to_save,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias=lora.bias,
        init_lora_weights=lora.init_lora_weights,
        layers_to_transform=lora.layers_to_transform,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        target_parameters=lora.target_parameters,
        trainable_token_indices=_token_rows(lora, model, tokens) or None,
    )
    _check_effect(lora, config, modules, head)
    return config


def _token_rows(lora: LoraConfig, model: PreTrainedModel, tokens: Sequence[int]) -> dict[str, list[int]]:
    """Added tokens by embedding: of the input, and of an output with weights of its own; not where it is trained whole."""
    if not tokens:
        return {}
    tables = [model.get_input_embeddings()]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not tables[0].weight:
        tables.append(head)
    names = [next(name for name, module in model.named_modules() if module is table) for table in tables]
    return {name: list(tokens) for name in names if not _matches(lora.modules_to_save or [], name)}


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of the layers that `all-linear` means."""
    return _linear(dict(model.named_modules()), _head_name(model))


def _linear(modules: Mapping[str, nn.Module], head: str) -> list[str]:
    """Names of what `all-linear` means: linear layers, the language model's head excepted."""
    return [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and name != head]


def _check_effect(lora: LoraConfig, config: PeftLoraConfig, modules: Mapping[str, nn.Module], head: str) -> None:
    """Everything the recipe names changes something.

    Raises:
        UsageError: no layer is left to adapt, or a name, pattern, index or `bias` would do nothing.
    """
    if config.target_modules == "all-linear":
        every = _linear(modules, head)
        config = dataclasses.replace(config, target_modules=every)
        chosen = [name for name in every if check_target_module_exists(config, name)]
    else:
        chosen = [name for name in modules if check_target_module_exists(config, name)]
    if not chosen and not lora.target_parameters:
        raise UsageError(
            "no layer gets an adapter: lora.exclude_modules, lora.modules_to_save or lora.layers_to_transform leave "
            "none of lora.target_modules",
            where="lora",
            todo="leave a layer to adapt, or set lora=null to train all weights",
        )
    for name in chosen:
        if not isinstance(modules[name], ADAPTABLE):
            raise UsageError(
                f"{name!r} cannot carry an adapter: it is a {type(modules[name]).__name__}",
                where="lora.target_modules",
                todo=f"name linear layers: {', '.join(_endings(_linear(modules, head)))}",
            )
    # Weights of their own have the pattern's rank by the name of the module they are in.
    weights = [name.rpartition(".")[0] for name in _target_weights(lora, modules)]
    _check_entries(lora, [*chosen, *weights])
    _check_whole(lora, modules)


def _check_entries(lora: LoraConfig, chosen: Sequence[str]) -> None:
    """Every target, pattern and layer index has its part in the layers that get an adapter."""
    if isinstance(lora.target_modules, list):
        for entry in lora.target_modules:
            if not any(_matches([entry], name) for name in chosen):
                raise _idle("lora.target_modules", entry, "is excluded elsewhere in the recipe", chosen)
    for key, patterns in (("lora.rank_pattern", lora.rank_pattern), ("lora.alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not any(_pattern_fits(pattern, name) for name in chosen):
                raise _idle(key, pattern, "fits no layer that gets an adapter", chosen)
    for number in _layer_numbers(lora.layers_to_transform):
        if number not in {int(found[1]) for name in chosen if (found := LAYER_NUMBER.match(name))}:
            raise _idle("lora.layers_to_transform", str(number), "is a layer where nothing gets an adapter", chosen)


def _check_whole(lora: LoraConfig, modules: Mapping[str, nn.Module]) -> None:
    """What is trained beside the adapter is there: weights of `modules_to_save`, biases."""
    for entry in lora.modules_to_save or []:
        found = [name for name in modules if _matches([entry], name)]
        if not any(True for name in found for _ in modules[name].parameters()):
            raise UsageError(f"{entry!r} has no weights to train", where="lora.modules_to_save", todo="leave it out")
        # PEFT goes by the end of the name's letters, not of its parts: `norm` would take `input_layernorm` too.
        more = [name for name in modules if name.endswith(entry) and name not in found]
        if more:
            raise UsageError(
                f"{entry!r} also is the end of {', '.join(_endings(more))}",
                where="lora.modules_to_save",
                todo=f"name more of it: {', '.join(_parents(found))}",
            )
    if lora.bias != "none" and not any(
        name.endswith("bias") for module in modules.values() for name, _ in module.named_parameters()
    ):
        raise UsageError(
            f"lora.bias={lora.bias} does nothing: the model has no biases", where="lora.bias", todo="leave it out"
        )


def _idle(key: str, entry: str, why: str, chosen: Sequence[str]) -> UsageError:
    return UsageError(
        f"{entry!r} {why}: it would do nothing",
        where=key,
        todo=f"leave it out; layers with an adapter: {', '.join(_endings(chosen))}",
    )


def _endings(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _parents(names: Sequence[str]) -> list[str]:
    return sorted({".".join(name.split(".")[-2:]) for name in names})


def _pattern_fits(pattern: str, name: str) -> bool:
    """PEFT's rule for the keys of `rank_pattern` and `alpha_pattern`."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _layer_numbers(layers: int | list[int] | None) -> list[int]:
    return [] if layers is None else [layers] if isinstance(layers, int) else layers


def _target_weights(lora: LoraConfig, modules: Mapping[str, nn.Module]) -> list[str]:
    """Parameters that `target_parameters` names, by PEFT's rule; not those of layers, which have adapters of their own.

    Raises:
        UsageError: an entry names none, or the weight of a layer.
    """
    found = []
    for entry in lora.target_parameters or []:
        names = [
            f"{module_name}.{name}"
            for module_name, module in modules.items()
            for name, _ in module.named_parameters(recurse=False)
            if f"{module_name}.{name}".endswith(f".{entry}") or f"{module_name}.{name}" == entry
        ]
        layers = [name for name in names if isinstance(modules[name.rpartition(".")[0]], ADAPTABLE)]
        if layers:
            raise UsageError(
                f"{layers[0]!r} is the weight of a layer",
                where="lora.target_parameters",
                todo="name the layer in lora.target_modules",
            )
        if not names:
            own = sorted(
                {
                    f"{module_name.rpartition('.')[2]}.{name}"
                    for module_name, module in modules.items()
                    for name, weight in module.named_parameters(recurse=False)
                    if weight.dim() == EXPERTS_DIMENSIONS
                }
            )
            hint = f"weights of experts are: {', '.join(own)}" if own else "the model has no experts kept as one weight"
            raise UsageError(f"the model has no parameter {entry!r}", where="lora.target_parameters", todo=hint)
        found += names
    return found


def _check_names(lora: LoraConfig, modules: dict[str, nn.Module]) -> None:
    """Every name and pattern of the recipe fits at least one layer."""
    if lora.target_modules != "all-linear":
        _each_fits("lora.target_modules", lora.target_modules, modules)
    if lora.exclude_modules is not None:
        _each_fits("lora.exclude_modules", lora.exclude_modules, modules)
    _each_fits("lora.modules_to_save", lora.modules_to_save or [], modules)
    for key, patterns in (("lora.rank_pattern", lora.rank_pattern), ("lora.alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not any(_pattern_fits(pattern, name) for name in modules):
                raise _unknown(key, pattern, modules)


def _each_fits(key: str, wanted: str | Sequence[str], modules: dict[str, nn.Module]) -> None:
    for entry in [wanted] if isinstance(wanted, str) else wanted:
        asked: str | list[str] = entry if isinstance(wanted, str) else [entry]
        if not any(_matches(asked, name) for name in modules):
            raise _unknown(key, entry, modules)


def _matches(wanted: str | Iterable[str], name: str) -> bool:
    """PEFT's rule: a string is a regular expression for the whole name, a list holds name endings."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in wanted)


def _unknown(key: str, entry: str, modules: dict[str, nn.Module]) -> UsageError:
    linear = sorted({name.rsplit(".", 1)[-1] for name, module in modules.items() if isinstance(module, nn.Linear)})
    near = difflib.get_close_matches(entry, [*linear, *(name.rsplit(".", 1)[-1] for name in modules)], n=3, cutoff=0.5)
    near = list(dict.fromkeys(near))
    hint = f"near names: {', '.join(near)}" if near else f"its linear layers are: {', '.join(linear)}"
    return UsageError(f"the model has no layer {entry!r}", where=key, todo=hint)


def _check_layers(layers: int | list[int] | None, modules: dict[str, nn.Module]) -> None:
    numbers = {int(part) for name in modules for part in name.split(".") if part.isdigit()}
    for layer in _layer_numbers(layers):
        if layer not in numbers:
            raise UsageError(
                f"the model has no layer {layer}",
                where="lora.layers_to_transform",
                todo=f"layers are numbered 0 to {max(numbers, default=0)}",
            )


def _head_name(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


def adapted_layers(model: PeftModel) -> dict[str, LoraLayer]:
    """The layers that carry an adapter, by their name in the base model."""
    base = model.get_base_model()
    return {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


def expected_trainable(model: PeftModel, lora: LoraConfig) -> int:
    """Trainable parameters that the recipe asks for, from the layers' shapes and ranks alone.

    A: r × in, B: out × r; DoRA adds one magnitude per output; `modules_to_save` adds whole layers, `bias` biases.
    """
    layers = adapted_layers(model)
    total = sum(_adapter_size(name, layer, lora) for name, layer in layers.items())
    base = model.get_base_model()
    for name, module in base.named_modules():
        if lora.modules_to_save and _matches(lora.modules_to_save, name) and not isinstance(module, BaseTunerLayer):
            whole = model.base_model.get_submodule(f"model.{name}.original_module")
            total += sum(map(elements, whole.parameters()))
        if isinstance(module, TrainableTokensWrapper) and module.token_adapter.tied_adapter is None:
            rows = len(module.token_adapter.token_indices["default"])
            total += rows * module.original_module.weight.shape[1]
    return total + _trained_biases(base, layers, lora)


def _adapter_size(name: str, layer: LoraLayer, lora: LoraConfig) -> int:
    if isinstance(layer, ParamWrapper):
        # Experts kept as one tensor: PEFT itself sizes their adapters, by architecture.
        return sum(parameter.numel() for part in (layer.lora_A, layer.lora_B) for parameter in part.parameters())
    ranks = [rank for pattern, rank in lora.rank_pattern.items() if _pattern_fits(pattern, name)]
    rank = ranks[0] if ranks else lora.r
    size = rank * (layer.in_features + layer.out_features)
    return size + (layer.out_features if lora.use_dora else 0)


def _trained_biases(base: nn.Module, layers: dict[str, LoraLayer], lora: LoraConfig) -> int:
    if lora.bias == "none":
        return 0
    total = 0
    for name, parameter in base.named_parameters():
        if not name.endswith("bias") or "lora_" in name:
            continue
        adapted = any(name.startswith(f"{layer}.") for layer in layers)
        total += elements(parameter) if lora.bias == "all" or adapted else 0
    return total


def complete_heads(model: nn.Module) -> None:
    """Give the head a `bias` where PEFT has wrapped it for added tokens: TRL computes the loss from the head's `weight`
    and `bias`, and PEFT's wrapper has the first alone."""
    for module in model.modules():
        if isinstance(module, TrainableTokensWrapper) and isinstance(module.original_module, nn.Linear):
            # Past nn.Module's own rule, which would make a second parameter of it.
            object.__setattr__(module, "bias", module.original_module.bias)


def taken_from_base(model: nn.Module) -> dict[str, Tensor]:
    """A and B as the adapter starts, where `init_lora_weights` has taken them out of the base weights; else nothing.

    Call it before the first step and before a checkpoint is loaded.

    Returns:
        by their names in the saved adapter, on the CPU.
    """
    if not isinstance(model, PeftModel) or model.peft_config["default"].init_lora_weights not in ("pissa", "olora"):
        return {}
    state = adapter_state(model)
    return {name: state[name].detach().cpu().clone() for name in state if ".lora_A." in name or ".lora_B." in name}


def on_untouched_base(state: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a plain adapter for the base as it was before `start` was taken out of it.

    The base of training is W - s B₀A₀, so W - s B₀A₀ + s BA = W + s [B, -B₀][A; A₀] with the scale s: an adapter of
    twice the rank (as PEFT converts PiSSA, arXiv:2404.02948 appendix C).

    Args:
        state: the trained adapter.
        start: see `taken_from_base`.
    """
    found = dict(state)
    for name, before in start.items():
        old = before.to(state[name])
        found[name] = torch.cat(
            [state[name], old] if ".lora_A." in name else [state[name], -old], dim=int(".lora_B." in name)
        )
    return found


def config_on_untouched_base(config: dict[str, object]) -> dict[str, object]:
    """The saved configuration of `on_untouched_base`: twice the rank, the same scale."""
    factor = 2**0.5 if config["use_rslora"] else 2

    def times(value: object, by: float) -> object:
        if isinstance(value, dict):
            return {name: times(item, by) for name, item in value.items()}
        return value * by if isinstance(value, int | float) else value

    scaled = {key: times(config[key], factor) for key in ("lora_alpha", "alpha_pattern")}
    return (
        config
        | scaled
        | {"r": times(config["r"], 2), "rank_pattern": times(config["rank_pattern"], 2)}
        | {"init_lora_weights": True}
    )
