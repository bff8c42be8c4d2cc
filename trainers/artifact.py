"""Saving what was trained: the adapter or the model, with tokenizer, chat template and a card, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blueprints.recipe.schema import Recipe
from trainers.peft import config_on_untouched_base, on_untouched_base


def save_artifact(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    source: dict[str, Any],
    output: Path,
    start: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Save `output/adapter` or `output/model` as safetensors.

    An adapter of a `hf://` model names the model's Hub id and commit as its base, so that it loads anywhere; of other
    models it names the directory in the workspace.

    Args:
        source: the model's manifest.
        start: what the adapter has taken out of the base, see `trainers.peft.taken_from_base`.
        state: the weights by name, of a sharded model; None: the model holds them.

    Returns:
        the directory.
    """
    name = "adapter" if isinstance(model, PeftModel) else "model"
    target, temporary = output / name, output / f".{name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    gathered: dict[str, Any] = {} if state is None else {"state_dict": dict(state)}
    if isinstance(model, PeftModel):
        model.save_pretrained(temporary, selected_adapters=["default"], **gathered)
        _fit_untouched_base(temporary, start)
    else:
        model.save_pretrained(temporary, **gathered)
    if name == "adapter" and recipe.model.uri.startswith("hf://"):
        # In the file alone: PEFT itself would look the live configuration's model up on the Hub.
        path = temporary / "adapter_config.json"
        hub, _, revision = recipe.model.uri.removeprefix("hf://").partition("@")
        commit = source.get("revision") or recipe.model.revision or revision or None
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"base_model_name_or_path": hub, "revision": commit}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").write_text(card(recipe, name), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.replace(target)
    return target


def _fit_untouched_base(directory: Path, start: Mapping[str, torch.Tensor]) -> None:
    """Make the saved adapter one for the base as it was fetched, where its start was taken out of the base."""
    if not start:
        return
    weights, path = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    save_file(on_untouched_base(load_file(weights), start), weights, metadata={"format": "pt"})
    config = config_on_untouched_base(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def card(recipe: Recipe, kind: str) -> str:
    """The model card: what it was made from and how."""
    base = recipe.model.uri
    hub = f"base_model: {base.removeprefix('hf://').partition('@')[0]}\n" if base.startswith("hf://") else ""
    library = "peft" if kind == "adapter" else "transformers"
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n{hub}tags: [llm-blueprints, {recipe.method}]\n---\n"
        f"# {'Adapter for' if kind == 'adapter' else 'Fine-tuned'} {base}\n\n"
        f"Trained with llm-blueprints, method `{recipe.method}`, on `{recipe.dataset.uri}`.\n"
        f"Recipe hash: `{recipe.hash()}`. The whole recipe, the measures and the proofs are in `run.json` beside it.\n"
    )
