"""The variable `LORA_CONFIG` of the environment: PEFT's names as JSON, one more layer over the `lora` block."""

from __future__ import annotations

from typing import Any

from blueprints.errors import Fault
from blueprints.recipe.document import Node, Origin, describe_value, read_json, unusable

VARIABLE = "LORA_CONFIG"
WHERE = f"environment {VARIABLE}"
FIXED = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
"""Names of PEFT's LoraConfig that can have one value here."""


def read_environment(text: str) -> tuple[Node | None, list[Fault]]:
    """The layer in the variable's text and the faults of the text; None where nothing could be read."""
    origin = Origin("environment", WHERE)
    expected = """a JSON object such as {"r": 4, "lora_alpha": 16}"""
    try:
        node = read_json(text, origin)
    except RecursionError:
        return None, [Fault(WHERE, "", "nested too deeply", expected)]
    except ValueError as error:
        return None, [Fault(WHERE, "", f"not JSON: {error}", expected)]
    if not isinstance(node.content, dict):
        return None, [Fault(WHERE, "", f"found {describe_value(node.plain())}", expected)]
    faults = list(unusable(node, ("lora",)))
    entries = dict(node.content)
    for name, value in FIXED.items():
        given: Any = entries.pop(name).plain() if name in entries else value
        if given not in (value, None):
            faults.append(Fault(WHERE, f"lora.{name}", f"found {describe_value(given)}", value))
    return Node({"lora": Node(entries, origin)}, origin), faults
