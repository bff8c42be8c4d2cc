"""`python -m blueprints.recipe.reference`: the recipe reference as Markdown, from the grammar."""

from __future__ import annotations

import sys

from pydantic import BaseModel

from blueprints.recipe.describe import accepts, default_of, item_model, model_of, one_line
from blueprints.recipe.schema import BLOCK_ORDER, METHODS, Recipe

HEAD = """# Recipe reference

<!-- Written by `make reference` from the docstrings in blueprints/recipe/schema.py: change it there. -->

A recipe is a YAML file (YAML 1.2: `2e-4` is a number, `yes` and `no` are strings). It needs `method`, `model` and
`dataset`; everything else has a default. `blueprints explain KEY` prints what stands here, and
`blueprints show RECIPE` every value with the place that set it.

```yaml
method: sft
model: hf://Qwen/Qwen3-0.6B
dataset: file:///data/chats.jsonl
lora: {r: 16}
```

## Layers

Values come in layers; later ones win:

1. the defaults on this page,
2. the recipe: the name of a shipped one (`blueprints recipes`) or a file,
3. overlay files, `-f FILE`, in order,
4. `key=value` arguments, in order: `lora.r=8`, `model=hf://org/name`, `sft.packing=true`,
5. `LORA_CONFIG` in the environment: JSON with PEFT's names over the `lora` block, such as `{"r": 4, "lora_alpha": 16}`.

Maps merge key by key, lists are replaced, `null` unsets a key (`lora=null`). A layer that names another model or data
set drops the `revision` below it. The value of a `key=value` argument is JSON, a list or map in brackets
(`'lora.target_modules=[q_proj, v_proj]'`), or else one plain text, number, `true` or `false`; a text that looks like
something else is quoted: `'dataset.split="1"'`.

An unknown key, a wrong type, a knob of another method, a knob that would do nothing, or a combination that cannot work
is an error: all of them are named at once, with file and line. Editors check while you type if the recipe begins with
`# yaml-language-server: $schema=PATH`, PATH being the output of `blueprints schema`.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD, "## Top level\n", _table(Recipe, "", list(BLOCK_ORDER))]
    for name in BLOCK_ORDER:
        found = Recipe.model_fields[name]
        block = model_of(found.annotation)
        if block is None:
            continue
        title = f"## {name}\n\n{one_line(block.__doc__ or '')}\n"
        if name in METHODS:
            title += f"\nOnly with `method: {name}`.\n"
        parts += [title, _table(block, name, list(block.model_fields))]
        for key, field in block.model_fields.items():
            item = item_model(field.annotation)
            if item is not None:
                parts.append(f"Each of `{name}.{key}` has:\n")
                parts.append(_table(item, f"{name}.{key}", list(item.model_fields)))
    return "\n".join(parts)


def _table(block: type[BaseModel], prefix: str, names: list[str]) -> str:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name in names:
        found = block.model_fields[name]
        key = f"{prefix}.{name}".lstrip(".")
        cells = (f"`{key}`", accepts(key, found), _code(default_of(found)), one_line(found.description or ""))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _code(default: str) -> str:
    in_words = default in ("required", "not set") or (" " in default and default[0] not in '["{')
    return default if in_words else f"`{default}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
