"""What each method trains on: the formats of rows it takes and the kind of sequences that are made of them.

Whoever checks a recipe, prepares rows or opens them reads these tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from blueprints.recipe.schema import Recipe

Kind = Literal["supervised", "preference", "prompt"]
"""`supervised`: token sequences with a loss mask. `preference`: a prompt with a better and a worse answer. `prompt`:
what the model answers in training, with the row's other columns for rewards."""

SUPERVISED = ("messages", "sharegpt", "prompt_completion", "alpaca", "text")
FORMATS: dict[str, tuple[str, ...]] = {
    "sft": SUPERVISED,
    "qat": SUPERVISED,
    "distill": (*SUPERVISED, "prompt"),
    "dpo": ("preference",),
    "ppo": ("prompt", "prompt_completion", "messages", "sharegpt", "alpaca"),
    "grpo": ("prompt", "prompt_completion", "messages", "sharegpt", "alpaca"),
}
"""Shapes of rows each method can train on."""
KINDS: dict[str, Kind] = {
    "sft": "supervised",
    "qat": "supervised",
    "distill": "supervised",
    "dpo": "preference",
    "ppo": "prompt",
    "grpo": "prompt",
}
"""What each method's rows become."""
CUSTOM_FORMATS = (*SUPERVISED, "preference", "prompt")
"""Shapes of rows for a method of one's own (`package.module:function`): all."""
_CUSTOM_KINDS: dict[str, Kind] = {"preference": "preference", "prompt": "prompt"}


def formats_of(method: str) -> tuple[str, ...]:
    """The formats of rows that a method takes."""
    return CUSTOM_FORMATS if ":" in method else FORMATS[method]


def kind_of(method: str, format: str) -> Kind:
    """The kind of sequences that rows of a format become; of a custom method the format alone decides."""
    return _CUSTOM_KINDS.get(format, "supervised") if ":" in method else KINDS[method]


def row_options(recipe: Recipe) -> dict[str, bool | int]:
    """The method's knobs that prepared rows depend on, as the manifest states them beside `max_length`.

    Returns:
        always `packing` and `completion_only_loss`; `max_completion_length` if the method lets the model answer the
        rows' prompts, as both must fit into the model's context.
    """
    own = recipe.sft or recipe.qat
    options: dict[str, bool | int] = {
        "packing": own.packing if own else False,
        "completion_only_loss": own.completion_only_loss if own else True,
    }
    sampling = recipe.grpo or recipe.ppo or (recipe.distill if samples(recipe) else None)
    return options | ({"max_completion_length": sampling.max_completion_length} if sampling else {})


def samples(recipe: Recipe) -> bool:
    """Whether a distillation samples answers, from the student or the teacher, so that its rows need prompts."""
    distill = recipe.distill
    return distill is not None and (distill.teacher is not None if distill.seq_kd else distill.lmbda > 0)


def wants_answers(recipe: Recipe) -> bool:
    """Whether a distillation takes batches from the rows' own answers, so that rows without one are of no use."""
    distill = recipe.distill
    return distill is not None and (distill.teacher is None if distill.seq_kd else distill.lmbda < 1)
