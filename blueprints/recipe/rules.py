"""Combinations that cannot work, each with its reason. A rule is a small function in the list at the end."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blueprints.errors import Fault
from blueprints.recipe.cluster_rules import cluster_faults
from blueprints.recipe.document import KeyPath, Node
from blueprints.recipe.rewards import reward_faults
from blueprints.recipe.rows import formats_of, samples, wants_answers
from blueprints.recipe.schema import IDLE, METHODS, Idle, Recipe, RewardFunction
from blueprints.recipe.uris import revision_in, uri_fault

SHARDED = ("fsdp", "zero2", "zero3")
SHARDABLE_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimizers that compute each element by itself, in plain PyTorch."""


@dataclass(frozen=True)
class Checked:
    """A recipe whose single values are right, with what is needed to point at them.

    Attributes:
        recipe: the recipe, not resolved.
        resolved: the same, resolved.
        merged: the values that were set, with their places.
        layers: the layers from the bottom, overrides as one.
    """

    recipe: Recipe
    resolved: Recipe
    merged: Node
    layers: Sequence[Sequence[Node]]

    def given(self, key: str) -> bool:
        """Whether some layer sets `key`, and no later one unsets it."""
        node = self.merged.at(_path(key))
        return node is not None and node.content is not None

    def rank(self, key: str) -> int:
        """The highest layer that says something about `key`; -1 if none does."""
        path = _path(key)
        ranks = [rank for rank, group in enumerate(self.layers) if any(node.at(path) is not None for node in group)]
        return max(ranks, default=-1)

    def fault(self, key: str, problem: str, expected: str = "", hint: str = "") -> Fault:
        """A fault at the place of `key`, or of its block, or of the method."""
        path = _path(key)
        places = [self.merged.at(path[:length]) for length in range(len(path), 0, -1)]
        # What is asked for by the method alone is shown where the method is set.
        places += [self.merged.at(("method",)), self.merged]
        where = next((node.origin.where for node in places if node is not None and node.origin.where), "recipe")
        return Fault(where, key, problem, expected, hint)


def _path(key: str) -> KeyPath:
    """`a.b[0].c` as `("a", "b", 0, "c")`."""
    steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)
    return tuple(int(index) if index else name for index, name in steps)


Rule = Callable[[Checked], Iterator[Fault]]


def rule_faults(recipe: Recipe, merged: Node, layers: Sequence[Node]) -> list[Fault]:
    """Every combination in `recipe` that cannot work.

    Args:
        recipe: the merged recipe, its single values right.
        merged: the same as a tree with places.
        layers: the layers it was merged from, from the bottom.
    """
    checked = Checked(recipe, recipe.resolve(), merged, _grouped(layers))
    return [fault for rule in RULES for fault in rule(checked)]


def _grouped(layers: Sequence[Node]) -> list[list[Node]]:
    groups: list[list[Node]] = []
    for node in layers:
        if groups and node.origin.layer == "override" == groups[-1][0].origin.layer:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _blocks_of_other_methods(at: Checked) -> Iterator[Fault]:
    method = "custom" if at.recipe.is_custom else at.recipe.method
    for name in (*METHODS, "custom"):
        if name != method and at.given(name):
            other = "package.module:function" if name == "custom" else name
            yield at.fault(
                name,
                f"knobs of the method {name}, but the method is {at.recipe.method}",
                f"no method's block but `{method}`",
                f"Remove it, unset it with `{name}=null`, or set `method: {other}`.",
            )


def _idle_knobs(at: Checked) -> Iterator[Fault]:
    """A knob that does nothing is a fault where it was set beside or above what makes it idle."""
    for idle in IDLE:
        block, name = at.recipe.part(idle.key)
        if block is None or not at.given(idle.key) or not idle.when(at.recipe):
            continue
        if at.rank(idle.key) >= at.rank(idle.switch) and not _harmless(idle, dict(block)[name], at):
            yield at.fault(idle.key, f"`{idle.key}` does nothing here: {idle.reason}", "", idle.todo)


def _harmless(idle: Idle, value: object, at: Checked) -> bool:
    return idle.off_is_fine and value == dict(at.resolved.part(idle.key)[0] or {})[idle.key.split(".")[1]]


def _sources(at: Checked) -> Iterator[Fault]:
    recipe = at.recipe
    uris = [("model.uri", recipe.model.uri, False), ("dataset.uri", recipe.dataset.uri, True)]
    if recipe.lora and recipe.lora.from_uri is not None:
        uris.append(("lora.from", recipe.lora.from_uri, False))
    if recipe.distill and recipe.distill.teacher:
        uris.append(("distill.teacher", recipe.distill.teacher, False))
    if recipe.ppo and recipe.ppo.reward_model:
        uris.append(("ppo.reward_model", recipe.ppo.reward_model, False))
    for key, uri, dataset in uris:
        wrong = uri_fault(uri, dataset=dataset)
        if key == "lora.from" and uri.startswith("builtin://"):
            yield at.fault(key, f"found {uri!r}, and no adapter is embedded", "file:///dir or hf://org/name")
        elif wrong is not None:
            yield at.fault(key, wrong.problem, wrong.expected, wrong.hint)


def _revisions(at: Checked) -> Iterator[Fault]:
    recipe = at.recipe
    named: list[tuple[str, str | None, str | None, str]] = [
        ("model.revision", recipe.model.uri, recipe.model.revision, "model"),
        ("dataset.revision", recipe.dataset.uri, recipe.dataset.revision, "data set"),
    ]
    if recipe.distill:
        named.append(("distill.teacher_revision", recipe.distill.teacher, recipe.distill.teacher_revision, "teacher"))
    for key, uri, revision, what in named:
        if revision is None or (uri is not None and uri_fault(uri, dataset=what == "data set") is not None):
            continue
        if uri is None or not uri.startswith("hf://"):
            yield at.fault(key, f"`{key}` does nothing here: the {what} is not from the Hub", "", "Leave it out.")
        elif (named_too := revision_in(uri)) is not None:
            problem = f"the revision is {revision!r}, and the URI names {named_too!r}"
            yield at.fault(key, problem, "one of the two", "Remove one.")


def _quantized_base(at: Checked) -> Iterator[Fault]:
    lora = at.recipe.lora
    if lora is None or not lora.quantize_base:
        return
    key = "lora.quantize_base"
    if at.recipe.method == "qat":
        yield at.fault(
            key,
            "QLoRA cannot be combined with the method qat: it trains weights for a later quantisation, "
            "and a base that is already in 4 bits has none left to train",
            "`quantize_base: false` with qat",
            "Leave it out, or use the method sft.",
        )
    if at.recipe.resources.strategy in ("fsdp", "zero3"):
        yield at.fault(
            key,
            f"bitsandbytes' 4-bit weights cannot be sharded by `resources.strategy: {at.recipe.resources.strategy}`",
            "`auto` or `ddp` with QLoRA",
            "Set `resources.strategy: ddp`.",
        )
    if lora.init_lora_weights in ("pissa", "olora"):
        yield at.fault(
            "lora.init_lora_weights",
            f"`{lora.init_lora_weights}` takes the base weights apart, which needs them in 16 or 32 bits, not in 4",
            "true, gaussian or orthogonal with `lora.quantize_base`",
        )


def _adapters(at: Checked) -> Iterator[Fault]:
    lora = at.recipe.lora
    if lora is None:
        return
    if lora.layers_to_transform is not None and isinstance(lora.target_modules, str):
        yield at.fault(
            "lora.layers_to_transform",
            f"layers can be chosen by index only among named modules; `lora.target_modules` is {lora.target_modules!r}",
            "`lora.target_modules` as a list of names",
            "Such as `target_modules: [q_proj, k_proj, v_proj, o_proj]`.",
        )
    if lora.init_lora_weights == "orthogonal" and any(r % 2 for r in (lora.r, *lora.rank_pattern.values())):
        yield at.fault("lora.init_lora_weights", "`orthogonal` needs an even rank", "an even `lora.r`")
    if lora.target_modules == [] and not lora.target_parameters:
        yield at.fault(
            "lora.target_modules",
            "the list is empty: no layer would get an adapter",
            "all-linear, a list of name endings or a regular expression",
            "Only `lora.target_parameters` makes up for an empty list.",
        )


def _experts(at: Checked) -> Iterator[Fault]:
    """What PEFT cannot do to adapters on weights that belong to no layer."""
    lora = at.recipe.lora
    if lora is None or not lora.target_parameters:
        return
    for key, wrong, instead in (
        ("lora_dropout", bool(lora.lora_dropout), "0"),
        ("use_dora", lora.use_dora, "false"),
        ("init_lora_weights", lora.init_lora_weights not in (True, False, "gaussian"), "true, gaussian or false"),
    ):
        if wrong:
            yield at.fault(
                f"lora.{key}",
                f"`lora.{key}` cannot be combined with `lora.target_parameters`: PEFT adds those adapters to the weights, "
                "not to a layer's input and output",
                f"{instead} with `lora.target_parameters`",
            )


OWN_MEMORY = {
    "training.activation_offloading": (("sft", "dpo", "qat"), "its trainer has no activation offloading"),
    "training.use_liger_kernel": (("sft", "dpo", "grpo", "qat"), "its trainer does not run on Liger's kernels"),
    "training.neftune_noise_alpha": (
        ("sft", "qat"),
        "it compares log-probabilities, which noise on the embeddings would falsify",
    ),
}
"""Knobs of the optimisation that some methods alone have: those methods, and why the others do not."""


def _methods_own_training(at: Checked) -> Iterator[Fault]:
    """A knob that the method's trainer cannot honour is refused, not ignored. Methods of one's own decide themselves."""
    recipe = at.recipe
    for key, (methods, reason) in OWN_MEMORY.items():
        block, name = recipe.part(key)
        if dict(block or {})[name] and recipe.method not in methods and not recipe.is_custom:
            yield at.fault(
                key, f"the method {recipe.method} cannot do this: {reason}", f"the method {', '.join(methods)}"
            )
    if recipe.is_custom and recipe.training.activation_offloading:
        yield at.fault("training.activation_offloading", "a method of one's own has no activation offloading", "false")


def _reference_by_adapter(at: Checked) -> Iterator[Fault]:
    """With an adapter the reference is the model with it switched off, which must be the base."""
    lora = at.recipe.lora
    if lora is None or at.recipe.method != "grpo":
        return
    why = f"the reference of {at.recipe.method} is the model with the adapter switched off, which"
    if lora.init_lora_weights in ("pissa", "olora"):
        yield at.fault(
            "lora.init_lora_weights",
            f"{why} would lack what `{lora.init_lora_weights}` takes out of the base",
            f"true, gaussian or orthogonal with {at.recipe.method}",
        )
    if lora.bias != "none":
        yield at.fault("lora.bias", f"{why} would keep the trained biases", f"none with {at.recipe.method}")


def _added_tokens(at: Checked) -> Iterator[Fault]:
    added = at.recipe.model.added_tokens
    twice = sorted({token for token in added if added.count(token) > 1})
    if twice:
        yield at.fault("model.added_tokens", f"named twice: {', '.join(twice)}", "each token once")
    if added and at.recipe.distill is not None and at.recipe.distill.teacher is not None:
        yield at.fault(
            "model.added_tokens",
            "the teacher has no such tokens, and distillation compares the two models token by token",
            "no added tokens with `distill.teacher`",
        )
    if added and at.recipe.resources.strategy in ("fsdp", "zero3"):
        yield at.fault(
            "model.added_tokens",
            f"embeddings cannot be made longer once `resources.strategy: {at.recipe.resources.strategy}` has sharded them",
            "ddp or zero2 with added tokens",
        )


def _rounded_sum(at: Checked) -> Iterator[Fault]:
    if at.recipe.method == "qat" and at.recipe.lora and at.recipe.resources.strategy == "fsdp":
        yield at.fault(
            "resources.strategy",
            "with adapters QAT rounds the sum of weight and adapter, and `fsdp` shards the two apart from each other",
            "ddp, zero2 or zero3 for qat with `lora`",
            "Set `resources.strategy: zero3`.",
        )


def _patterns(at: Checked) -> Iterator[Fault]:
    """Layers chosen by a regular expression that is none: PEFT would stop after the model was fetched and loaded."""
    lora = at.recipe.lora
    if lora is None:
        return
    named = [("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)]
    found = [(f"lora.{key}", value) for key, value in named if isinstance(value, str)]
    found += [(f"lora.rank_pattern.{name}", name) for name in lora.rank_pattern]
    found += [(f"lora.alpha_pattern.{name}", name) for name in lora.alpha_pattern]
    for key, pattern in found:
        try:
            with warnings.catch_warnings(action="ignore"):
                re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            yield at.fault(key, f"{pattern!r} is no regular expression: {error}", "a name or a regular expression")


def _half_precision(at: Checked) -> Iterator[Fault]:
    if at.recipe.lora is None and at.recipe.model.dtype == "float16":
        yield at.fault(
            "model.dtype",
            "all weights cannot be trained in float16: small gradients vanish in it",
            "auto, bfloat16 or float32 without `lora`",
        )


def _processes(at: Checked) -> Iterator[Fault]:
    resources = at.resolved.resources
    processes = resources.num_proc_per_node or 1
    if resources.strategy in SHARDED and resources.num_nodes * processes == 1:
        yield at.fault(
            "resources.strategy",
            f"`{resources.strategy}` shares the work among processes, and the run has one",
            "`auto` with one process",
            "Raise `resources.num_nodes`, `resources.gpu` or `resources.num_proc_per_node`.",
        )
    if 0 < resources.gpu < processes:
        yield at.fault(
            "resources.num_proc_per_node",
            f"{processes} processes cannot share {resources.gpu} GPU{'' if resources.gpu == 1 else 's'}",
            f"at most {resources.gpu}, one process for each GPU",
        )


def _sharded_optimizer(at: Checked) -> Iterator[Fault]:
    strategy, optim = at.recipe.resources.strategy, at.recipe.training.optim
    if strategy in SHARDED and optim not in SHARDABLE_OPTIMIZERS:
        reason = (
            "keeps statistics of whole rows and columns"
            if optim == "adafactor"
            else "is bitsandbytes', whose kernels and blocks of state are those of whole weights"
        )
        yield at.fault(
            "training.optim",
            f"`{optim}` {reason}, and `resources.strategy: {strategy}` leaves each process a part of them",
            f"{', '.join(SHARDABLE_OPTIMIZERS)} with {strategy}",
            "Each process keeps only its part of the optimizer's state anyway; or set `resources.strategy: ddp`.",
        )


def _sharded_adapter(at: Checked) -> Iterator[Fault]:
    """Adapters that need the whole base weights at some moment."""
    lora, strategy = at.recipe.lora, at.recipe.resources.strategy
    if lora is None or strategy not in ("fsdp", "zero3"):
        return
    apart = f"and `resources.strategy: {strategy}` leaves each process a part of them"
    reasons = {
        "lora.init_lora_weights": (
            strategy == "zero3" and lora.init_lora_weights in ("pissa", "olora"),
            "takes the base weights apart",
        ),
        "lora.from": (
            strategy == "zero3" and lora.from_uri is not None,
            "the earlier adapter is held against the base weights before training",
        ),
        "lora.target_parameters": (bool(lora.target_parameters), "adapts the experts' weights as one tensor"),
        "model.added_tokens": (bool(at.recipe.model.added_tokens), "trains single rows of the embedding's weights"),
    }
    for key, (wanted, reason) in reasons.items():
        if wanted:
            yield at.fault(key, f"{reason}, {apart}", "ddp or zero2 with it", "Set `resources.strategy: zero2`.")


def _needs_gpu(at: Checked) -> Iterator[Fault]:
    if at.recipe.resources.gpu:
        return
    if at.recipe.model.attn_implementation.startswith("flash_attention"):
        yield at.fault(
            "model.attn_implementation",
            f"`{at.recipe.model.attn_implementation}` runs on GPUs alone, and `resources.gpu` is 0",
            "auto, sdpa or eager on CPU",
            "Set `resources.gpu: 1` or more for a GPU.",
        )
    optim = at.recipe.training.optim
    if optim.startswith("paged_"):
        instead = {"paged_adamw_8bit": "adamw_bnb_8bit", "paged_adamw_32bit": "adamw_torch"}
        yield at.fault(
            "training.optim",
            f"`{optim}` pages state out of GPU memory, and `resources.gpu` is 0",
            f"{instead.get(optim, optim.removeprefix('paged_'))}, which works on CPU too, or another optimizer",
        )
    if at.recipe.training.activation_offloading:
        yield at.fault(
            "training.activation_offloading",
            "it moves activations out of GPU memory, and `resources.gpu` is 0: they are in the machine's memory already",
            "false on CPU",
            "`training.gradient_checkpointing: true` saves memory on CPU too.",
        )
    if at.recipe.training.use_liger_kernel:
        yield at.fault(
            "training.use_liger_kernel", "Liger's kernels run on GPUs alone, and `resources.gpu` is 0", "false on CPU"
        )


def _schedule(at: Checked) -> Iterator[Fault]:
    training = at.recipe.training
    if training.warmup_steps >= 1 and training.warmup_steps % 1:
        yield at.fault(
            "training.warmup_steps", f"found {training.warmup_steps}", "a whole number of steps, or a share below 1"
        )
    if len(set(training.report_to)) < len(training.report_to):
        yield at.fault("training.report_to", "a tracker is named twice", "each tracker once")


def _held_out_rows(at: Checked) -> Iterator[Fault]:
    dataset = at.recipe.dataset
    if dataset.eval_split is not None and dataset.eval_split == dataset.split:
        yield at.fault(
            "dataset.eval_split",
            f"{dataset.eval_split!r} is the split that is trained on: the score would be of rows the model has seen",
            "another split",
            "To hold out a part of it, set `dataset.test_size`.",
        )
    if dataset.eval_split is not None and dataset.test_size:
        yield at.fault(
            "dataset.test_size",
            f"`dataset.eval_split` names the held-out rows already ({dataset.eval_split!r})",
            "one of the two",
            "Remove one.",
        )
    if dataset.test_size == 0 and dataset.eval_split is None:
        for key, wanted in (
            ("eval.metric", at.recipe.eval.metric != "none"),
            ("training.eval_steps", at.recipe.training.eval_steps is not None),
        ):
            if wanted:
                hint = "Set `dataset.test_size` or `dataset.eval_split`."
                yield at.fault(key, "needs held-out rows, and `dataset.test_size: 0` holds none out", "", hint)


def _row_format(at: Checked) -> Iterator[Fault]:
    method, given = at.recipe.method, at.recipe.dataset.format
    if given not in ("auto", *formats_of(method)):
        yield at.fault(
            "dataset.format",
            f"rows of the format {given} cannot be used by the method {method}",
            f"auto, {', '.join(formats_of(method))}",
        )
    elif given == "prompt" and wants_answers(at.recipe):
        yield at.fault(
            "dataset.format",
            "rows of the format prompt have no answers, and below `distill.lmbda: 1` some batches are trained on answers",
            "rows with answers, or `distill.lmbda: 1`",
        )
    elif given == "text" and samples(at.recipe):
        yield at.fault(
            "dataset.format",
            "rows of the format text have no prompts, and above `distill.lmbda: 0` the student answers prompts",
            "rows with prompts, or `distill.lmbda: 0`",
        )


def _teacher(at: Checked) -> Iterator[Fault]:
    distill = at.recipe.distill
    if at.recipe.method == "distill" and distill and distill.teacher is None and not distill.seq_kd:
        yield at.fault(
            "distill.teacher",
            "required, but missing: distillation compares the model with a teacher",
            "the URI of a model, such as hf://Qwen/Qwen3-4B",
            "With `distill.seq_kd: true` the rows may hold the teacher's text instead.",
        )


def _stored_teacher(at: Checked) -> Iterator[Fault]:
    distill = at.recipe.distill
    if at.recipe.method != "distill" or distill is None or distill.teacher_top_k is None:
        return
    key, found = "distill.teacher_top_k", "the teacher scores the rows' answers before training"
    if distill.seq_kd:
        yield at.fault(key, f"{found}, and `distill.seq_kd` trains on text alone", "one of the two", "Remove one.")
    elif distill.teacher is None:
        return  # missing, which is said already
    elif distill.lmbda > 0:
        yield at.fault(
            key,
            f"{found}: it cannot have scored what the student answers later, and with `distill.lmbda: {distill.lmbda:g}` "
            "some batches are such answers",
            "`distill.lmbda: 0` with stored scores",
            "Set `distill.lmbda: 0`, or leave `distill.teacher_top_k` out: the teacher then runs beside the student.",
        )


PAIRED_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "aot", "discopop", "sigmoid_norm")
"""Losses of DPO that compare the two answers alone; the others compare each answer with the reference too."""


def _preferences(at: Checked) -> Iterator[Fault]:
    dpo = at.recipe.dpo
    if at.recipe.method != "dpo" or dpo is None:
        return
    if dpo.loss_type == "exo_pair" and not dpo.label_smoothing:
        yield at.fault(
            "dpo.label_smoothing", "the loss `exo_pair` has no value at 0", "above 0, such as 1e-3 (arXiv:2402.00856)"
        )
    if dpo.reference_free and dpo.loss_type not in PAIRED_LOSSES:
        why = (
            "has no reference at all" if dpo.loss_type == "sft" else "compares each answer with the reference by itself"
        )
        yield at.fault(
            "dpo.reference_free",
            f"the loss `{dpo.loss_type}` {why}",
            f"`reference_free: false`, or one of the losses {', '.join(PAIRED_LOSSES)}",
        )
    if at.recipe.base_changes and dpo.precompute_ref_log_probs is False and not dpo.reference_free:
        yield at.fault(
            "dpo.precompute_ref_log_probs",
            "with the adapter switched off the model is not the reference: trained biases, `pissa` and `olora` change "
            "the base's weights, and with `lora.from` the reference is the model with that adapter",
            "true: the reference's log-probabilities are computed before step 1",
            "Leave it out.",
        )


def _rewards(at: Checked) -> Iterator[Fault]:
    recipe = at.recipe
    if recipe.method == "grpo" and recipe.grpo and not recipe.grpo.reward_funcs:
        yield at.fault(
            "grpo.reward_funcs", "required, but missing", "one reward or more", "Such as `[{name: exact_match}]`."
        )
    if recipe.method == "ppo" and recipe.ppo and bool(recipe.ppo.reward_model) == bool(recipe.ppo.reward_funcs):
        found = "both are set" if recipe.ppo.reward_model else "neither is set"
        key = "ppo.reward_model"
        yield at.fault(key, f"{found}: `reward_model` and `reward_funcs`", "exactly one of the two")
    for method, options in (("grpo", recipe.grpo), ("ppo", recipe.ppo)):
        if recipe.method == method and options is not None:
            yield from _reward_functions(at, f"{method}.reward_funcs", options.reward_funcs)


def _reward_functions(at: Checked, key: str, rewards: Sequence[RewardFunction]) -> Iterator[Fault]:
    for index, reward in enumerate(rewards):
        for wrong in reward_faults(reward):
            yield at.fault(f"{key}[{index}].{wrong.key}", wrong.problem, wrong.expected, wrong.hint)
    if rewards and all(reward.weight == 0 for reward in rewards):
        yield at.fault(f"{key}[0].weight", "every reward has the weight 0: nothing would be learnt", "one other than 0")


def _critic(at: Checked) -> Iterator[Fault]:
    """A critic of its own with LoRA stands on the policy's very weights, which must then stay as they are."""
    lora, ppo, strategy = at.recipe.lora, at.recipe.ppo, at.recipe.resources.strategy
    if ppo is None:
        return
    if strategy == "fsdp":
        yield at.fault(
            "resources.strategy",
            "PPO samples with the policy, a part of the module that `fsdp` shards as a whole",
            "ddp, zero2 or zero3 with the method ppo",
        )
    if strategy == "zero3" and ppo.value_head == "separate":
        yield at.fault(
            "ppo.value_head",
            "the critic is made of the policy's weights, and `resources.strategy: zero3` leaves each process a part of them",
            "`shared`, or the strategies ddp and zero2",
        )
    if lora is None:
        return
    if strategy == "zero3" and lora.use_dora:
        yield at.fault(
            "lora.use_dora",
            "DoRA computes with the weights of other layers while the policy samples, and `resources.strategy: zero3` leaves "
            "each process a part of them",
            "false, or the strategies ddp and zero2",
        )
    if strategy == "zero3" and ppo.kl_coef and (lora.bias != "none" or lora.init_lora_weights is False):
        key = "lora.bias" if lora.bias != "none" else "lora.init_lora_weights"
        yield at.fault(
            key,
            "the reference is then the trained values as they started, and `resources.strategy: zero3` leaves each process "
            "a part of them",
            "the default, `ppo.kl_coef: 0`, or the strategies ddp and zero2",
        )
    if ppo.value_head != "separate":
        return
    for key, wrong, reason in (
        ("lora.init_lora_weights", lora.init_lora_weights in ("pissa", "olora"), "takes its adapter out of"),
        ("lora.bias", lora.bias != "none", "trains"),
    ):
        if wrong:
            value = dict(lora)[key.removeprefix("lora.")]
            yield at.fault(
                key,
                f"`{value}` {reason} weights of the base, on which the critic of `ppo.value_head: separate` stands too",
                "the default, or `ppo.value_head: shared`",
            )


def _groups(at: Checked) -> Iterator[Fault]:
    grpo, training, resources = at.resolved.grpo, at.resolved.training, at.resolved.resources
    if at.recipe.method != "grpo" or grpo is None:
        return
    processes = resources.num_nodes * (resources.num_proc_per_node or 1)
    steps = grpo.steps_per_generation or training.gradient_accumulation_steps
    batch = training.per_device_train_batch_size * steps * processes
    if batch % grpo.num_generations:
        yield at.fault(
            "grpo.num_generations",
            f"a batch of {batch} completions ({training.per_device_train_batch_size} per process x "
            f"{steps} micro-steps x {processes} processes) is no whole number of groups of {grpo.num_generations}",
            "a divisor of the batch",
        )


def _group_losses(at: Checked) -> Iterator[Fault]:
    """Losses of GRPO and what they are not defined for."""
    grpo = at.recipe.grpo
    if at.recipe.method != "grpo" or grpo is None:
        return
    level, of_sequences = grpo.importance_sampling_level, ("grpo", "luspo", "sapo")
    if level == "sequence" and grpo.loss_type not in of_sequences:
        yield at.fault(
            "grpo.importance_sampling_level",
            f"the loss `{grpo.loss_type}` is defined on the ratios of tokens",
            f"`token`, or one of the losses {', '.join(of_sequences)}",
        )
    if level == "token" and grpo.loss_type == "luspo":
        key, expected = "grpo.importance_sampling_level", "`sequence`"
        yield at.fault(key, "the loss `luspo` is defined on the ratios of whole completions", expected)


def _vllm(at: Checked) -> Iterator[Fault]:
    grpo, lora = at.recipe.grpo, at.recipe.lora
    if grpo is None or not grpo.use_vllm:
        return
    if grpo.vllm_mode == "server" and not grpo.vllm_server_base_url:
        hint = "Such as `http://127.0.0.1:8000`."
        yield at.fault("grpo.vllm_server_base_url", "required by `grpo.vllm_mode: server`, but missing", "a URL", hint)
    if grpo.vllm_server_base_url and not re.match(r"https?://[^/\s]+", grpo.vllm_server_base_url):
        yield at.fault("grpo.vllm_server_base_url", f"found {grpo.vllm_server_base_url!r}", "a URL, http://host:port")
    if grpo.vllm_mode == "colocate" and grpo.vllm_server_base_url:
        reason = "`grpo.vllm_server_base_url` does nothing here: `grpo.vllm_mode` is colocate"
        yield at.fault("grpo.vllm_server_base_url", reason, "", "Set `grpo.vllm_mode: server` or leave it out.")
    if grpo.vllm_mode == "colocate" and not at.recipe.resources.gpu:
        yield at.fault("grpo.use_vllm", "vLLM runs on GPUs, and `resources.gpu` is 0", "false, or a GPU")
    if grpo.vllm_mode == "server" and lora is not None and lora.quantize_base:
        reason = "the server is sent weights with the adapter merged in, which a base in 4 bits cannot give"
        yield at.fault("grpo.vllm_mode", reason, "`colocate` with `lora.quantize_base`")


def _cluster(at: Checked) -> Iterator[Fault]:
    """What is asked of a cluster, and secrets, which are asked of nobody."""
    for key, problem, expected, hint in cluster_faults(at.recipe):
        yield at.fault(key, problem, expected, hint)


RULES: tuple[Rule, ...] = (
    _blocks_of_other_methods,
    _sources,
    _revisions,
    _idle_knobs,
    _quantized_base,
    _adapters,
    _experts,
    _methods_own_training,
    _reference_by_adapter,
    _added_tokens,
    _rounded_sum,
    _patterns,
    _half_precision,
    _processes,
    _sharded_optimizer,
    _sharded_adapter,
    _needs_gpu,
    _schedule,
    _held_out_rows,
    _row_format,
    _teacher,
    _stored_teacher,
    _preferences,
    _rewards,
    _critic,
    _groups,
    _cluster,
    _group_losses,
    _vllm,
)
