"""Effective settings: what was asked beside what is, asserted before the first step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from blueprints.errors import EnvironmentFault, JobFailedError, UsageError
from blueprints.recipe.schema import Recipe
from trainers.model import elements
from trainers.peft import adapted_layers, expected_trainable
from trainers.process import World

PROBE_TOKENS = 2048
"""Tokens of a packed row, at most, on which isolation is measured."""


@dataclass(frozen=True)
class Setting:
    """One line of the block: what the recipe asks for, what is in effect, and whether that is the same."""

    name: str
    asked: str
    seen: str
    ok: bool = True

    def __str__(self) -> str:
        value = self.seen if self.asked in ("", self.seen) else f"asked {self.asked}, in effect {self.seen}"
        return f"  {self.name:<24} {value}{'' if self.ok else '   <- NOT AS ASKED'}"


def assert_settings(settings: list[Setting]) -> dict[str, Any]:
    """Stop when a setting is not as asked.

    Returns:
        the settings as plain data for `run.json`.

    Raises:
        JobFailedError: one is not.
    """
    wrong = [setting for setting in settings if not setting.ok]
    if wrong:
        said = "; ".join(f"{setting.name}: asked {setting.asked}, in effect {setting.seen}" for setting in wrong)
        raise JobFailedError(
            said, where="effective settings", todo="this is a fault of llm-blueprints: please report it"
        )
    return {setting.name: setting.seen for setting in settings}


def check_world(recipe: Recipe, world: World) -> None:
    """The processes are those the recipe asks for.

    Raises:
        UsageError: another number of processes.
        EnvironmentFault: fewer GPUs than asked for.
    """
    resources = recipe.resources
    per_node = resources.num_proc_per_node or 1
    if (world.local_size, world.size) != (per_node, per_node * resources.num_nodes):
        raise UsageError(
            f"the recipe asks for {resources.num_nodes} node(s) of {per_node} process(es), "
            f"this run has {world.size} process(es), {world.local_size} on this node",
            where="resources",
            todo=f"start it with torchrun --nnodes={resources.num_nodes} --nproc-per-node={per_node} "
            f"(mpirun -n {per_node * resources.num_nodes}), or set resources.num_nodes and resources.num_proc_per_node",
        )
    if resources.gpu:
        _check_gpus(resources.gpu, per_node)


def _check_gpus(asked: int, processes: int) -> None:
    here = torch.cuda.device_count()
    if here < asked:
        raise EnvironmentFault(
            f"the recipe asks for {asked} GPU(s), this machine has {here}",
            where="resources.gpu",
            todo="set resources.gpu=0 to train on CPU" if not here else f"set resources.gpu={here}",
        )
    if processes != asked:
        raise UsageError(
            f"{processes} process(es) for {asked} GPU(s): each process drives one",
            where="resources.num_proc_per_node",
            todo=f"set resources.num_proc_per_node={asked}",
        )


def model_settings(model: nn.Module, recipe: Recipe, device: torch.device, bf16: bool) -> list[Setting]:
    """Settings of the model as it is about to be trained."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(map(elements, trainable))
    if recipe.lora:
        assert isinstance(model, PeftModel)
        expected = expected_trainable(model, recipe.lora)
    else:
        expected = sum(map(elements, model.parameters()))
    total = sum(_elements(parameter) for parameter in model.parameters())
    kernel = str(model.config._attn_implementation)
    asked = recipe.model.attn_implementation
    quantised = sum(_is_4bit(parameter) for parameter in model.parameters())
    wants = bool(recipe.lora and recipe.lora.quantize_base)
    frozen = Counter(_type_name(p) for p in model.parameters() if not p.requires_grad)
    lines = [
        Setting(
            "device", "", device.type if device.type == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"
        ),
        Setting("trainable parameters", f"{expected:,}", f"{count:,}", expected == count),
        Setting("all parameters", "", f"{total:,} ({100 * count / total:.2f}% trained)"),
        Setting("attention kernel", asked if asked != "auto" else "", kernel, asked in ("auto", kernel)),
        Setting("trained weights", "", _names(Counter(map(_type_name, trainable)))),
        Setting("frozen weights", "", _names(frozen) if frozen else "none"),
        Setting("compute", "", "bfloat16 (mixed precision)" if bf16 else _names(Counter([str(_compute(model))]))),
        Setting("4-bit layers", "", str(quantised), wants == (quantised > 0)),
    ]
    return lines + (_adapter_settings(model, recipe) if isinstance(model, PeftModel) else [])


def _adapter_settings(model: PeftModel, recipe: Recipe) -> list[Setting]:
    lora = recipe.lora
    assert lora is not None
    layers = adapted_layers(model)
    names = Counter(name.rsplit(".", 1)[-1] for name in layers)
    dora = sum(bool(layer.lora_magnitude_vector) for layer in layers.values())
    scale = {layer.scaling["default"] for layer in layers.values()}
    alpha = lora.lora_alpha or 2 * lora.r
    wanted = alpha / (lora.r**0.5 if lora.use_rslora else lora.r)
    fits = bool(lora.rank_pattern or lora.alpha_pattern) or all(abs(value - wanted) < 1e-9 for value in scale)
    return [
        Setting("LoRA layers", "", f"{len(layers)}: {_names(names)}", len(layers) > 0),
        Setting("LoRA scaling", f"{wanted:.6g}", ", ".join(f"{value:.6g}" for value in sorted(scale)), fits)
        if not (lora.rank_pattern or lora.alpha_pattern)
        else Setting("LoRA scaling", "", ", ".join(f"{value:.6g}" for value in sorted(scale))),
        Setting("DoRA layers", "", str(dora), dora == (len(layers) if lora.use_dora else 0)),
    ]


def _compute(model: nn.Module) -> str:
    if any(_is_4bit(parameter) for parameter in model.parameters()):
        return str(model.config.quantization_config.bnb_4bit_compute_dtype).removeprefix("torch.")
    return str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")


def _elements(parameter: nn.Parameter) -> int:
    # Two 4-bit weights share a byte.
    return elements(parameter) * (2 if _is_4bit(parameter) else 1)


def _type_name(parameter: nn.Parameter) -> str:
    return "4 bits" if _is_4bit(parameter) else str(parameter.dtype).removeprefix("torch.")


def _is_4bit(parameter: nn.Parameter) -> bool:
    # By name: bitsandbytes is imported only by those who quantise.
    return type(parameter).__name__ == "Params4bit"


def _names(counts: Counter[str]) -> str:
    return ", ".join(f"{name} × {count}" if count > 1 else name for name, count in counts.most_common())


@torch.no_grad()
def isolation(model: nn.Module, ids: list[int], lengths: list[int], device: torch.device, bf16: bool) -> dict[str, Any]:
    """Measure on a real packed row whether its documents see each other.

    Twice, on the live model in evaluation mode: the logits of each document in the row against the document alone, and
    the change of the later documents' logits when the tokens of the first are replaced (a leak shows however small).

    Args:
        ids: tokens of the packed row.
        lengths: lengths of its documents.

    Returns:
        `documents`, `difference` (largest difference of a logit to the documents alone), `leak` (largest change).

    Raises:
        UsageError: documents see each other with this model and attention kernel.
    """
    documents = _probe(lengths)
    if len(documents) < 2:
        return {"documents": len(documents), "difference": 0.0, "leak": 0.0}
    total = sum(documents)
    tokens = torch.tensor([ids[:total]], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in documents])[None]
    other = tokens.clone()
    other[0, : documents[0]] = tokens[0, : documents[0]].flip(0).roll(1)

    def logits(given: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            found: torch.Tensor = model(input_ids=given, position_ids=at, use_cache=False).logits
        return found.float()

    model.eval()
    packed = logits(tokens, positions)
    leak = (packed - logits(other, positions))[:, documents[0] :].abs().max().item()
    difference, start = 0.0, 0
    for length in documents:
        alone = logits(tokens[:, start : start + length], positions[:, start : start + length])
        difference = max(difference, (packed[:, start : start + length] - alone).abs().max().item())
        start += length
    exact = _compute(model) == "float32" and not bf16
    bound = (1e-3 if exact else 0.1) * max(1.0, packed.std().item())
    if leak > bound / 10 or difference > bound:
        raise UsageError(
            f"packed documents see each other: logits differ by {difference:.2g} from the documents alone (bound "
            f"{bound:.2g}) and change by {leak:.2g} with another document's tokens",
            where=f"sft.packing with {type(model).__name__} and attention {model.config._attn_implementation}",
            todo="set sft.packing=false, or another model.attn_implementation",
        )
    return {"documents": len(documents), "difference": difference, "leak": leak}


def _probe(lengths: list[int]) -> list[int]:
    """The first documents of the row, as many as fit the probe, at most four."""
    chosen: list[int] = []
    for length in lengths[:4]:
        if chosen and sum(chosen) + length > PROBE_TOKENS:
            break
        chosen.append(length)
    return chosen
