"""The weights of an adapter, as they are saved: what is trained and nothing of the base."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor


def adapter_state(model: PeftModel, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter's weights by their names in its file.

    Args:
        whole: the weights by name, of a sharded model; None: the model holds them.
    """
    given = None if whole is None else dict(whole)
    state: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=given, save_embedding_layers=False)
    return state


def save_without_embeddings(model: PeftModel) -> None:
    """Keep the base's embeddings out of every checkpoint: PEFT would save them whole where tokens were added."""
    model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False)
