"""Quantisation by torchao: simulated while training, real in the artifact, the same numbers in both.

Simulated ("fake") quantisation rounds weights, and where asked activations, to the values that the quantised model will
have, in floating point; gradients pass the rounding unchanged. With LoRA the merged weight is rounded, W + s·BA: what is
quantised in the end is that sum, not W alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxUnpackedToInt8Tensor,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import FakeQuantizedLinear, QATConfig
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from blueprints.errors import UsageError
from blueprints.recipe.schema import QATOptions

Config = Int8DynamicActivationIntxWeightConfig | IntxWeightOnlyConfig


def torchao_config(base_config: str, group_size: int) -> Config:
    """torchao's configuration: symmetric weights with a scale for each group; activations, where they are quantised,
    asymmetric with a scale for each token. All run on any device, in plain PyTorch."""
    groups = PerGroup(group_size)
    if "_dynamic_act_" in base_config:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=weight_type(base_config), weight_granularity=groups)
    return IntxWeightOnlyConfig(weight_dtype=weight_type(base_config), granularity=groups)


def weight_type(base_config: str) -> torch.dtype:
    """The type of the quantised weights: `int4_weight_only` has torch.int4."""
    dtype: torch.dtype = getattr(torch, base_config.split("_weight")[0].rpartition("_")[2])
    return dtype


def quantised_layers(model: PreTrainedModel, options: QATOptions) -> list[str]:
    """Names of the layers that will be quantised: the linear ones, as Transformers chooses them, without the head.

    Raises:
        UsageError: there are none, or a layer's inputs are no whole number of groups.
    """
    kept = get_keys_to_not_convert(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and should_convert_module(name, kept)
    }
    if not linear:
        raise UsageError(
            f"{type(model).__name__} has no linear layers that torchao could quantise",
            where="qat",
            todo="use another model",
        )
    wrong = {name: module for name, module in linear.items() if module.in_features % options.group_size}
    if wrong:
        name, module = next(iter(wrong.items()))
        fits = [size for size in (256, 128, 64, 32, 16, 8) if all(m.in_features % size == 0 for m in linear.values())]
        raise UsageError(
            f"the {module.in_features} inputs of {name} are no whole number of groups of {options.group_size} "
            f"({len(wrong)} of {len(linear)} layers)",
            where="qat.group_size",
            todo=f"use one of: {', '.join(map(str, fits))}" if fits else "use another model",
        )
    return list(linear)


def simulate(model: PreTrainedModel | PeftModel, layers: Sequence[str], config: Config) -> None:
    """Replace `layers`, named as in the base model, by ones that round as the quantised model will."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    wanted = set()
    for name in layers:
        module = base.get_submodule(name)
        # With LoRA the layer of that name holds the linear layer inside, or a whole copy of it that is trained.
        wanted.update(id(part) for inner, part in module.named_modules() if _is_weight(inner, part))
    quantize_(base, QATConfig(config, step="prepare"), filter_fn=lambda module, _: id(module) in wanted)
    for name in layers:
        module = base.get_submodule(name)
        if isinstance(module, LoraLinear):
            module.forward = MethodType(_merged_forward, module)


def _is_weight(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not name.startswith("lora_")


def _merged_forward(self: LoraLinear, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """A LoRA layer whose merged weight is rounded; the same sum, in the same type, as PEFT's merge makes."""
    layer = self.get_base_layer()
    weight = layer.weight
    if not self.disable_adapters:
        for adapter in self.active_adapters:
            weight = merged(self, adapter, weight)
    if layer.activation_fake_quantizer is not None:
        x = layer.activation_fake_quantizer(x)
    return F.linear(x, layer.weight_fake_quantizer(weight), layer.bias)


def merged(layer: LoraLinear, adapter: str, weight: torch.Tensor) -> torch.Tensor:
    """`weight` with the adapter in it: W + s·BA; with DoRA that, each row scaled to its magnitude (arXiv:2402.09353)."""
    delta = layer.get_delta_weight(adapter).to(weight.dtype)
    if adapter not in layer.lora_magnitude_vector:
        return weight + delta
    magnitude = layer.lora_magnitude_vector[adapter]
    norm = magnitude.get_weight_norm(weight, delta, scaling=1).detach()
    return (magnitude.weight / norm).view(-1, 1).to(weight.dtype) * (weight + delta)


def simulated(model: nn.Module) -> list[FakeQuantizedLinear]:
    """The layers that round."""
    return [module for module in model.modules() if isinstance(module, FakeQuantizedLinear)]


def switch(model: nn.Module, *, on: bool) -> None:
    """Switch the rounding of all layers on or off."""
    for layer in simulated(model):
        for quantizer in (layer.activation_fake_quantizer, layer.weight_fake_quantizer):
            if quantizer is not None:
                quantizer.enabled = on


@contextmanager
def unquantised(model: nn.Module) -> Iterator[None]:
    """The model without rounding, inside."""
    switch(model, on=False)
    try:
        yield
    finally:
        switch(model, on=True)


def save_quantised(source: Path, target: Path, what: Mapping[str, Any], load: Mapping[str, Any]) -> None:
    """Quantise the model in `source` and save it to `target`, as Transformers reads it without further settings.

    Args:
        what: `base_config` and `group_size`.
        load: settings of `from_pretrained`.
    """
    config = TorchAoConfig(torchao_config(what["base_config"], what["group_size"]))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, **load)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for path in source.iterdir():
        known = path.suffix in (".json", ".jinja", ".model", ".txt", ".md") and "index" not in path.name
        if known and not (temporary / path.name).exists():
            shutil.copy2(path, temporary / path.name)
    shutil.rmtree(target, ignore_errors=True)
    temporary.replace(target)


def torchao_layers(model: PreTrainedModel) -> list[str]:
    """Names of the layers whose weight torchao holds quantised."""
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, nn.Linear) and _quantised(module.weight)]


def _quantised(weight: torch.Tensor) -> bool:
    return isinstance(weight, IntxUnpackedToInt8Tensor)
