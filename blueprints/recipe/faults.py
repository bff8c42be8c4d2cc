"""From pydantic's errors to faults: the place, the value found, what was expected in plain words, the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from blueprints.errors import Fault
from blueprints.recipe.describe import choices_of, describe_field, field_at, model_of
from blueprints.recipe.document import KeyPath, Node, Origin, describe_value, dotted, from_plain, scalar
from blueprints.recipe.schema import BLOCK_ORDER, METHODS, SHORT_FORMS, Block, Recipe

SYNONYMS = {
    "activation_offload": "training.activation_offloading",
    "adapter": "lora.from",
    "adapter_name_or_path": "lora.from",
    "add_tokens": "model.added_tokens",
    "adam_beta_1": "training.adam_beta1",
    "adam_beta_2": "training.adam_beta2",
    "alpha": "lora.lora_alpha",
    "attention": "model.attn_implementation",
    "base_model": "model.uri",
    "batch_size": "training.per_device_train_batch_size",
    "context_length": "training.max_length",
    "cutoff_len": "training.max_length",
    "data": "dataset.uri",
    "dataset_name": "dataset.uri",
    "dataset_path": "dataset.uri",
    "dora": "lora.use_dora",
    "dropout": "lora.lora_dropout",
    "epochs": "training.num_train_epochs",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "finetuning_type": "lora",
    "flash_attention": "model.attn_implementation",
    "fp16": "training.bf16",
    "gpus": "resources.gpu",
    "grad_accum": "training.gradient_accumulation_steps",
    "gradient_accumulation": "training.gradient_accumulation_steps",
    "image": "runtime.image",
    "learning_rate_scheduler": "training.lr_scheduler_type",
    "load_in_4bit": "lora.quantize_base",
    "liger": "training.use_liger_kernel",
    "liger_kernel": "training.use_liger_kernel",
    "lora_model_dir": "lora.from",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_target": "lora.target_modules",
    "lora_target_modules": "lora.target_modules",
    "lr": "training.learning_rate",
    "lr_scheduler": "training.lr_scheduler_type",
    "max_seq_len": "training.max_length",
    "max_seq_length": "training.max_length",
    "micro_batch_size": "training.per_device_train_batch_size",
    "model_id": "model.uri",
    "model_max_length": "training.max_length",
    "model_name": "model.uri",
    "model_name_or_path": "model.uri",
    "name": "runtime.name",
    "new_tokens": "model.added_tokens",
    "nnodes": "resources.num_nodes",
    "nodes": "resources.num_nodes",
    "nproc_per_node": "resources.num_proc_per_node",
    "num_epochs": "training.num_train_epochs",
    "num_gpus": "resources.gpu",
    "optimizer": "training.optim",
    "path": "dataset.uri",
    "qlora": "lora.quantize_base",
    "rank": "lora.r",
    "rslora": "lora.use_rslora",
    "scheduler": "training.lr_scheduler_type",
    "sequence_len": "training.max_length",
    "target": "lora.target_modules",
    "task": "method",
    "teacher_model": "distill.teacher",
    "teacher_model_name_or_path": "distill.teacher",
    "torch_dtype": "model.dtype",
    "train_batch_size": "training.per_device_train_batch_size",
    "trainer": "method",
    "type": "method",
    "val_set_size": "dataset.test_size",
    "wandb": "training.report_to",
    "warmup": "training.warmup_steps",
    "warmup_ratio": "training.warmup_steps",
}
"""Names other tools use, and the key that means the same here."""

EXAMPLES = {
    "method": "Such as `method: sft`.",
    "model": "Such as `model: hf://Qwen/Qwen3-0.6B`.",
    "dataset": "Such as `dataset: file:///data/rows.jsonl`.",
}

NO_PACKING = (
    "`{method}` has no packing: {reason}. The methods with packing are sft (`sft.packing`) and qat (`qat.packing`)."
)
NO_PACKING_REASONS = {
    "dpo": "the answers of a pair are compared with each other and cannot share a sequence",
    "ppo": "it trains on completions it samples itself",
    "grpo": "it trains on completions it samples itself",
    "distill": "student and teacher are compared token by token on whole rows",
}


def schema_faults(node: Node, *, partial: bool) -> dict[KeyPath, Fault]:
    """What the grammar says against a tree of values, by path.

    Args:
        node: the root of a recipe or of one layer.
        partial: the tree is one layer: what is missing may come from another.
    """
    try:
        Recipe.model_validate(_without_nulls(node))
    except ValidationError as error:
        return _translated(Recipe, node, error, partial=partial)
    return {}


def python_faults(block: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> list[Fault]:
    """The faults of a block built in Python with wrong values."""
    plain = {key: _plain(value) for key, value in values.items()}
    node = from_plain(plain, Origin("python", f"python {block.__name__}"))
    return list(_translated(block, node, error, partial=False).values())


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def _without_nulls(node: Node) -> Any:
    """Plain data in which null, outside lists, is absence."""
    if isinstance(node.content, dict):
        return {key: _without_nulls(item) for key, item in node.content.items() if item.content is not None}
    return node.plain()


def _translated(block: type[BaseModel], node: Node, error: ValidationError, *, partial: bool) -> dict[KeyPath, Fault]:
    faults: dict[KeyPath, Fault] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        path = _real_path(node, detail["loc"], detail["type"])
        if detail["type"] == "missing":
            if partial and not any(isinstance(step, int) for step in path):
                continue
            faults[path] = _missing(block, node, path)
        elif detail["type"] == "extra_forbidden":
            faults[path] = _unknown(block, node, path)
        elif path not in faults:
            faults[path] = _wrong(block, node, path)
    # Of a union, the branch that looked deeper knows better: `[1, a]` is a list with one wrong item, not "no string".
    return {path: fault for path, fault in faults.items() if not any(_below(other, path) for other in faults)}


def _below(path: KeyPath, ancestor: KeyPath) -> bool:
    return len(path) > len(ancestor) and path[: len(ancestor)] == ancestor


def _real_path(node: Node, loc: tuple[int | str, ...], kind: str) -> KeyPath:
    """The path in the tree: pydantic's location without the names of union branches and short forms expanded."""
    path: KeyPath = ()
    for index, step in enumerate(loc):
        here = node.at(path)
        is_map = here is not None and isinstance(here.content, dict)
        if is_map and node.at((*path, step)) is None and not (kind == "missing" and index == len(loc) - 1):
            continue
        if not is_map and not (isinstance(step, int) and node.at((*path, step)) is not None):
            continue
        path = (*path, step)
    return path


def _where(node: Node, path: KeyPath) -> str:
    for length in range(len(path), -1, -1):
        found = node.at(path[:length])
        if found is not None and found.origin.where:
            return found.origin.where
    return node.origin.where


def _missing(block: type[BaseModel], node: Node, path: KeyPath) -> Fault:
    found = field_at(block, path)
    expected = "a URI" if path[-1] in ("model", "dataset", "uri") else describe_field(found) if found else "a value"
    hint = EXAMPLES.get(str(path[0]), "")
    return Fault(_where_missing(node, path), dotted(path), "required, but missing", expected, hint)


def _where_missing(node: Node, path: KeyPath) -> str:
    """Where a value was unset, else the block it belongs in, else the recipe.

    A block that only a layer above the recipe made (`dataset.split=x`) is not what lacks the value: the recipe is.
    """
    block = node.at(path[:-1])
    in_list = any(isinstance(step, int) for step in path)
    if node.at(path) is None and block is not None and block.origin.layer != node.origin.layer and not in_list:
        return node.origin.where
    return _where(node, path)


def _wrong(block: type[BaseModel], node: Node, path: KeyPath) -> Fault:
    at, found, where = node.at(path), field_at(block, path), _where(node, path)
    value = at.plain() if at is not None else None
    problem, hint = f"found {describe_value(value)}", _hint(found, path, at, where)
    return Fault(where, dotted(path), problem, _expected(path, found), hint)


def _expected(path: KeyPath, found: FieldInfo | None) -> str:
    if found is None:
        return "another value"
    block = model_of(found.annotation)
    if block is None:
        return describe_field(found)
    short = SHORT_FORMS.get(dotted(path))
    long = f"a map with keys such as {', '.join(list(block.model_fields)[:3])}"
    return f"{'a URI' if short == 'uri' else 'a name'}, or {long}" if short else long


def _hint(found: FieldInfo | None, path: KeyPath, at: Node | None, where: str) -> str:
    """A next action for values people often get slightly wrong."""
    if found is None or at is None:
        return ""
    text, value = describe_field(found), at.plain()
    if isinstance(value, str):
        if ("number" in text or "integer" in text) and _is_number(value):
            return "Remove the quotes."
        if "boolean" in text and value.lower() in ("yes", "no", "on", "off", "true", "false", "y", "n"):
            return f"Write `{'true' if value.lower() in ('yes', 'on', 'true', 'y') else 'false'}`."
        if text.startswith("a list") and value in (choices_of(found) or [value]):
            return f"Write `{path[-1]}: [{value}]`."
        if value.startswith("=") and where.startswith("override"):
            return f"Write one `=`: {dotted(path)}{value}"
        close = difflib.get_close_matches(value.lower(), choices_of(found), 1, 0.5)
        if close:
            return f"Did you mean `{close[0]}`?"
    if isinstance(value, bool) and text.startswith("a map"):
        return f"Write `{path[-1]}: {{}}` for the defaults." if value else f"Write `{path[-1]}: null` to leave it out."
    if isinstance(value, float) and value.is_integer() and "an integer" in text:
        return f"Write `{int(value)}`."
    if isinstance(value, int | float) and not isinstance(value, bool) and "string" in text:
        if where.startswith("override"):
            return f"For a text, quote twice, once for the shell: '{dotted(path)}=\"{at.text or value}\"'."
        return f'Put it into quotes: "{at.text or value}".'
    return ""


def _is_number(text: str) -> bool:
    try:
        value = scalar(text)
    except ValueError:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unknown(block: type[BaseModel], node: Node, path: KeyPath) -> Fault:
    owner = model_of_path(block, path[:-1])
    name = str(path[-1])
    prefix = dotted(path[:-1])
    inside = f"a key of `{prefix}`" if prefix else "a key of a recipe" if block is Recipe else "a known key"
    hint = nearest_key(owner or block, prefix, name, whole=issubclass(block, Block) and "method" in block.model_fields)
    return Fault(_where(node, path), dotted(path), "unknown key", inside, hint)


def model_of_path(block: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The block at `path` below `block`."""
    if not path:
        return block
    found = field_at(block, path)
    return model_of(found.annotation) if found is not None else None


def all_keys() -> dict[str, FieldInfo]:
    """Every key of a recipe, dotted, in the order recipes are written: blocks before their own keys."""
    keys: dict[str, FieldInfo] = {}
    for name in BLOCK_ORDER:
        found = Recipe.model_fields[name]
        keys[name] = found
        block = model_of(found.annotation)
        if block is not None:
            keys |= {f"{name}.{key}": inner for key, inner in block.model_fields.items()}
    return keys


def nearest_key(owner: type[BaseModel], prefix: str, name: str, *, whole: bool = True) -> str:
    """A sentence that leads from an unknown key to the right one.

    Args:
        owner: the block the key stands in.
        prefix: that block's dotted key, empty at the top.
        name: the unknown key.
        whole: whether other blocks of the recipe may be named.
    """
    if name == "packing" and whole:
        if prefix in NO_PACKING_REASONS:
            return NO_PACKING.format(method=prefix, reason=NO_PACKING_REASONS[prefix])
        return "Packing is a knob of the method: `sft.packing` or `qat.packing`."
    folded = name.lower().replace("-", "_")
    here = list(owner.model_fields)
    if folded in here:
        return f"Did you mean `{folded}`?"
    target = SYNONYMS.get(folded) or SYNONYMS.get(f"{prefix}_{folded}")
    elsewhere = _elsewhere(prefix) if whole else {}
    if target is not None and (whole or target.split(".")[-1] in here):
        block, _, key = target.rpartition(".")
        if key in here and block == prefix:
            return f"Here it is called `{key}`."
        if whole:
            return f"Here it is `{key}` under `{block}`." if block else f"Here it is `{key}`."
    if folded in elsewhere:
        return _belongs(folded, elsewhere[folded])
    close = difflib.get_close_matches(folded, here, 1, 0.6)
    if close:
        return f"Did you mean `{close[0]}`?"
    other = difflib.get_close_matches(folded, list(elsewhere), 1, 0.75)
    if other:
        return f"Did you mean `{other[0]}`? " + _belongs(other[0], elsewhere[other[0]])
    return f"Known keys: {', '.join(here)}."


def _elsewhere(prefix: str) -> dict[str, list[str]]:
    """Every key by its last part, with the blocks that have it, this one left out."""
    places: dict[str, list[str]] = {}
    for key in all_keys():
        block, _, last = key.rpartition(".")
        if block != prefix:
            places.setdefault(last, []).append(block)
    return places


def _belongs(key: str, blocks: list[str]) -> str:
    named = [f"`{block}`" for block in blocks if block]
    if not named:
        return f"`{key}` belongs at the top level."
    methods_only = all(block in METHODS for block in blocks)
    return f"`{key}` belongs under {' or '.join(named)}" + (", the method's own block." if methods_only else ".")
