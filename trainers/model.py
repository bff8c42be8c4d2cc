"""The base model and its tokenizer as the recipe wants them: weights' type, 4-bit base, attention kernel, device."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blueprints.errors import DataError, EnvironmentFault, UsageError
from blueprints.recipe.schema import Recipe
from blueprints.tokens import add_tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_tokenizer(directory: Path, recipe: Recipe) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the recipe's chat template if it has one and a padding token in any case.

    Raises:
        DataError: the directory holds no tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=recipe.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"the model's tokenizer cannot be loaded: {_first_line(error)}",
            where=str(directory),
            todo="use a model whose directory holds tokenizer.json and tokenizer_config.json",
        ) from error
    if recipe.model.chat_template is not None:
        tokenizer.chat_template = recipe.model.chat_template
    add_tokens(tokenizer, recipe.model.added_tokens)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def new_tokens(directory: Path, recipe: Recipe) -> list[int]:
    """Ids of `model.added_tokens`."""
    if not recipe.model.added_tokens:
        return []
    ids = load_tokenizer(directory, recipe).convert_tokens_to_ids(list(recipe.model.added_tokens))
    return [int(token) for token in ids]


@torch.no_grad()
def make_room(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Give new tokens rows in the embeddings, of the input and of the output: the mean of all rows before them."""
    if not tokens:
        return
    if max(tokens) >= embedding_rows(model):
        model.resize_token_embeddings(max(tokens) + 1, mean_resizing=False)
    first = min(tokens)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        if table is not None:
            table.weight[list(tokens)] = table.weight[:first].float().mean(dim=0).to(table.weight.dtype)


def mixed_precision(recipe: Recipe, device: torch.device) -> bool:
    """Whether to compute in bfloat16 over weights of another type: `training.bf16`, by the hardware under `auto`.

    Raises:
        EnvironmentFault: bfloat16 is asked for on a GPU that has none.
    """
    supported = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if recipe.training.bf16 == "auto":
        return device.type == "cuda" and supported
    if recipe.training.bf16 and not supported:
        raise EnvironmentFault(
            "training.bf16=true, but this GPU has no bfloat16", where=torch.cuda.get_device_name(device),
            todo="set training.bf16=false",
        )  # fmt: skip
    return bool(recipe.training.bf16)


def weights_dtype(directory: Path, recipe: Recipe, device: torch.device) -> torch.dtype:
    """Type the model's weights are loaded in: `model.dtype`, by the rule of `auto`.

    `auto` is float32 on CPU. On GPU frozen weights keep the type they were saved in; weights that are trained are
    float32, because updates at usual learning rates are lost in 16 bits.

    Raises:
        UsageError: float16 weights are to be trained.
    """
    asked = recipe.model.dtype
    if asked == "float16" and recipe.lora is None:
        raise UsageError(
            "weights in float16 cannot be trained: their gradients overflow",
            where="model.dtype",
            todo="set model.dtype=bfloat16 or float32, or train an adapter (lora)",
        )
    if asked != "auto":
        return DTYPES[asked]
    if device.type == "cpu" or recipe.lora is None:
        return torch.float32
    saved = AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=recipe.model.trust_remote_code
    ).dtype
    return saved if isinstance(saved, torch.dtype) else torch.bfloat16


def load_model(directory: Path, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The base model, complete and as asked: no weight left at random, no other kernel than the one named.

    Raises:
        DataError: weights are missing, cut or of another model; it is no causal language model.
        EnvironmentFault: bitsandbytes or the attention kernel is not installed.
        UsageError: the model has no such attention kernel, or cannot recompute activations.
    """
    settings: dict[str, Any] = {
        "dtype": weights_dtype(directory, recipe, device),
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    if recipe.lora and recipe.lora.quantize_base:
        settings["quantization_config"] = quantization(recipe, device)
    # A model that is to be sharded may not fit one GPU: it goes there shard by shard.
    if device.type == "cuda" and recipe.resources.strategy not in ("fsdp", "zero3"):
        settings["device_map"] = {"": device.index or 0}
    kernels = ["sdpa", "eager"] if recipe.model.attn_implementation == "auto" else [recipe.model.attn_implementation]
    model = load_causal_lm(directory, kernels, settings)
    make_room(model, new_tokens(directory, recipe))
    if recipe.training.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise UsageError(
            f"{type(model).__name__} cannot recompute activations",
            where="training.gradient_checkpointing",
            todo="set training.gradient_checkpointing=false",
        )
    return model


def load_causal_lm(directory: Path, kernels: list[str], settings: dict[str, Any]) -> PreTrainedModel:
    """Load a causal language model with the first of `kernels` it has; see `load_model` for the errors."""
    check_architecture(directory, trust_remote_code=bool(settings["trust_remote_code"]))
    for kernel in kernels:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                directory, local_files_only=True, use_safetensors=True, attn_implementation=kernel,
                output_loading_info=True, **settings,
            )  # fmt: skip
        except ImportError as error:
            raise EnvironmentFault(
                _first_line(error), where=f"model.attn_implementation={kernel}",
                todo=f"install what it names, or set model.attn_implementation={'eager' if kernel == 'sdpa' else 'sdpa'}",
            ) from error  # fmt: skip
        except ValueError as error:
            if "attention implementation" not in str(error).lower() and kernel not in str(error):
                raise
            if kernel != kernels[-1]:
                continue
            raise UsageError(
                f"the model does not run with this attention kernel: {_first_line(error)}",
                where=f"model.attn_implementation={kernel}",
                todo="set model.attn_implementation=auto",
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise DataError(
                f"the model cannot be loaded: {_first_line(error)}",
                where=str(directory),
                todo="use a model saved as safetensors; see model.ignore_patterns for what is left out",
            ) from error
        _check_complete(report, directory)
        exact_on_cpu(model)
        return model
    raise AssertionError("unreachable: the last kernel either loads or raises")


def check_architecture(directory: Path, *, trust_remote_code: bool) -> None:
    """The model's configuration is one that Transformers knows, of a causal language model.

    Raises:
        DataError: it is not.
        UsageError: it needs code of its own, which the recipe does not allow to run.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                "the model brings Python code of its own",
                where="model.trust_remote_code",
                todo="read that code, then set model.trust_remote_code=true, or use another model",
            ) from error
        raise DataError(
            f"the model's architecture is not known: {_first_line(error)}",
            where=str(directory / "config.json"),
            todo="use a model that Transformers supports, or a newer Transformers",
        ) from error
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})  # set only where there is such code
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise DataError(
            f"the model is no causal language model: its configuration is a {type(config).__name__}",
            where=str(directory / "config.json"),
            todo="use a decoder model that generates text",
        )


def exact_on_cpu(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on CPUs with AVX512-BF16.

    It would do so in the first evaluation: from then on it computes in bfloat16, and without gradients to the layers
    below. Nothing to do on GPU or without 4-bit layers.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False


def _check_complete(report: dict[str, Any], directory: Path) -> None:
    missing, mismatched = sorted(report["missing_keys"]), sorted(str(key) for key in report["mismatched_keys"])
    if missing or mismatched:
        names = ", ".join((missing + mismatched)[:5])
        raise DataError(
            f"{len(missing)} weights are missing and {len(mismatched)} have another shape ({names}): they would be random",
            where=str(directory),
            todo="fetch the model again, or use one that is a complete causal language model",
        )


def quantization(recipe: Recipe, device: torch.device) -> BitsAndBytesConfig:
    """QLoRA's 4-bit base (arXiv:2305.14314) by bitsandbytes.

    Raises:
        EnvironmentFault: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentFault(
            "lora.quantize_base needs bitsandbytes, which is not installed",
            where="lora.quantize_base",
            todo="pip install bitsandbytes, or set lora.quantize_base=false",
        )
    lora = recipe.lora
    assert lora is not None
    compute = torch.bfloat16 if mixed_precision(recipe, device) else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=lora.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute,
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def elements(parameter: torch.nn.Parameter) -> int:
    """Elements of a parameter as a whole: DeepSpeed ZeRO-3 leaves 0 of it where it is not needed at the moment."""
    return int(vars(parameter).get("ds_numel", parameter.numel()))


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the model's embedding: token ids it can take."""
    weight = model.get_input_embeddings().weight
    return int(vars(weight).get("ds_shape", weight.shape)[0])
