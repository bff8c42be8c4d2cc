"""The policy and its value head in one module, as PPO trains them; and the reference the policy is held to."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import selective_log_softmax_and_entropy

from blueprints.recipe.schema import Recipe
from trainers.peft import adapter_config


class ActorCritic(nn.Module):
    """A language model and the value of its states, computed together: one forward pass for DDP to see.

    The value of the state before a token is read where the token is predicted, by a linear head in float32 that starts
    at 0, on the hidden state that the language model's own head gets.

    Args:
        policy: the language model, with its adapter if it has one.
        trunk: a transformer of the critic's own, with its adapter if it has one; None: the policy's.
        temperature: the one completions are sampled at; log-probabilities and entropy are of that distribution.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel, trunk: nn.Module | None, temperature: float) -> None:
        super().__init__()
        self.policy, self.trunk, self.temperature = policy, trunk, temperature
        self.value_head = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.value_head.to(next(policy.parameters()).device)
        self.keeps = "logits_to_keep" in inspect.signature(language_model(policy).forward).parameters
        self._hidden: torch.Tensor | None = None
        if trunk is None:
            language_model(policy).get_output_embeddings().register_forward_pre_hook(self._see)

    def _see(self, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0]

    def activation_checkpointing_enable(self, **settings: Any) -> None:
        """Transformers' switch: recompute activations, of both transformers."""
        for model in (self.policy, self.trunk):
            if model is not None:
                model.activation_checkpointing_enable(**settings)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, places: torch.Tensor, first: int
    ) -> dict[str, torch.Tensor]:
        """Log-probabilities, entropies and values of completion tokens.

        Args:
            input_ids, attention_mask, places: see `trainers.rollout.padded`.
            first: the smallest of `places`.

        Returns:
            `logprobs`, `entropy` (without gradient), `values`: of the shape of `places`, float32.
        """
        kept = input_ids.shape[1] - first + 1
        found = completion_logprobs(
            self.policy, input_ids, attention_mask, places, first, self.temperature, keeps=self.keeps
        )
        hidden, self._hidden = self._hidden, None
        if self.trunk is not None:
            hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        assert hidden is not None
        with torch.autocast(input_ids.device.type, enabled=False):
            values = self.value_head(hidden[:, -kept:-1].float()).squeeze(-1)
        return found | {"values": values.gather(1, places - first)}

    def critic_state(self) -> dict[str, torch.Tensor]:
        """What of the critic is trained, by name: a checkpoint keeps it beside the policy."""
        return {
            name: parameter.detach()
            for name, parameter in self.named_parameters()
            if not name.startswith("policy.") and parameter.requires_grad
        }

    def load_critic(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up what `critic_state` gave."""
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in state.items():
                parameters[name].copy_(tensor)


def language_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model without PEFT's wrapper; its adapters are in its layers."""
    found: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    return found


def completion_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    places: torch.Tensor,
    first: int,
    temperature: float,
    *,
    keeps: bool,
) -> dict[str, torch.Tensor]:
    """Log-probabilities and entropies of completion tokens; see `ActorCritic.forward`.

    Args:
        keeps: whether the model can leave out the logits of the prompts.
    """
    kept = input_ids.shape[1] - first + 1  # from the position that predicts the first completion token to the end
    less = {"logits_to_keep": kept} if keeps else {}
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **less).logits
    logprobs, entropy = selective_log_softmax_and_entropy(
        logits[:, -kept:-1].float(), input_ids[:, first:], entropy_requires_grad=False, temperature=temperature
    )
    at = places - first
    return {"logprobs": logprobs.gather(1, at), "entropy": entropy.gather(1, at)}


def critic_trunk(model: PreTrainedModel, recipe: Recipe) -> nn.Module:
    """A transformer for the critic alone, to be made before `model` gets its adapter.

    With LoRA it has an adapter of its own on the very weights of `model`, which are frozen: they are in memory once.
    Without LoRA it is a copy, trained as a whole.
    """
    lora = recipe.lora
    if lora is None:
        return copy.deepcopy(model).base_model
    # A copy of the modules that shares what they hold: parameters, and the constants of 4-bit weights.
    shared: list[Any] = list(model.parameters())
    shared += [vars(module)["quant_state"] for module in model.modules() if "quant_state" in vars(module)]
    twin = copy.deepcopy(model, memo={id(each): each for each in shared})
    plain = lora.model_copy(update={"modules_to_save": None, "bias": "none", "from": None, "init_lora_weights": True})
    adapted = get_peft_model(twin, adapter_config(plain, twin))
    return language_model(adapted).base_model


class Reference:
    """The policy as it was before training, for log-probabilities alone; the cheapest way that is exact.

    With LoRA: the adapter switched off, if it starts as nothing; otherwise (PiSSA, OLoRA, an earlier adapter, trained
    biases) its starting values, kept and put into place for a moment. Without LoRA: a frozen copy.

    Args:
        policy: before step 1, on its device.
        recipe: says how its adapter starts.
        copy: the same model once more, for a policy without an adapter.
    """

    def __init__(
        self, policy: PreTrainedModel | PeftModel, recipe: Recipe, copy: PreTrainedModel | None = None
    ) -> None:
        self.policy = policy
        self.copy = copy.requires_grad_(False).eval() if copy is not None else None
        self.kept: dict[str, torch.Tensor] = {}
        if isinstance(policy, PeftModel) and not starts_as_nothing(recipe):
            self.kept = {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}

    def __str__(self) -> str:
        if self.copy is not None:
            return f"a frozen copy of {sum(p.numel() for p in self.copy.parameters()):,} parameters"
        if self.kept:
            return f"the policy with its {sum(t.numel() for t in self.kept.values()):,} trained values as they started"
        return "the policy with its adapter switched off: no second model"

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        """The reference model, in evaluation mode if the policy is."""
        if self.copy is not None:
            yield self.copy
        elif self.kept:
            self._swap()
            try:
                yield self.policy
            finally:
                self._swap()
        else:
            assert isinstance(self.policy, PeftModel)
            with self.policy.disable_adapter():
                yield self.policy

    def _swap(self) -> None:
        for name, parameter in self.policy.named_parameters():
            if name in self.kept:
                parameter.data, self.kept[name] = self.kept[name], parameter.data


def starts_as_nothing(recipe: Recipe) -> bool:
    """Whether the base with its adapter switched off is the model that training starts from, and stays it."""
    lora = recipe.lora
    return lora is not None and (
        lora.init_lora_weights in (True, "gaussian", "orthogonal")
        and lora.from_uri is None
        and lora.bias == "none"
        and not recipe.model.added_tokens
    )
