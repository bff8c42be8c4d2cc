"""`python -m trainers.prove output/proof/adapter.json`: reload a saved artifact from disk and hold it against the live
model's logits and tensors, which the training process kept. Exit code 0: it computes the same; 4: it does not.

With `--merge` the adapter, once proved, is merged into its base and saved as `output/model`. With `--quantize` the
quantised model is first made of `output/model`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blueprints.errors import ExitCode

SHOWN = 5
"""Names listed of those at fault."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; its findings go beside the specification as `<kind>.result.json`."""
    parser = argparse.ArgumentParser(prog="python -m trainers.prove", description="Prove a saved artifact again.")
    parser.add_argument(
        "specification", type=Path, help="output/proof/adapter.json, model.json, merged.json or quantized.json"
    )
    parser.add_argument("--merge", action="store_true", help="also save the adapter merged into its base")
    parser.add_argument("--quantize", action="store_true", help="first make the quantised model")
    arguments = parser.parse_args(argv)
    from trainers.quiet import quiet

    quiet(main=False)
    specification = json.loads(arguments.specification.read_text(encoding="utf-8"))
    output = arguments.specification.parents[1].absolute()
    result = arguments.specification.with_name(f"{specification['kind']}.result.json")
    if arguments.quantize:
        quantize(specification, output)
    found, model = prove(specification, output, arguments.specification.with_suffix(".safetensors"))
    if arguments.merge and found["passed"]:
        merge(model, specification, output)
    from trainers.checkpoint import write_json

    write_json(result, found)
    print(summary(specification["kind"], found))
    return int(ExitCode.DONE if found["passed"] else ExitCode.JOB_FAILED)


def prove(specification: dict[str, Any], output: Path, logits: Path) -> tuple[dict[str, Any], Any]:
    """Reload the artifact and compare.

    Returns:
        the findings (`passed`, `faults`, `rows`, `positions`, `difference`, `bound`, ...) and the reloaded model.
    """
    import torch
    from safetensors.torch import load_file

    from trainers.proof import hashes, last_logits

    faults: list[str] = []
    model = reload(specification, output, faults)
    if specification["tensors"]:
        faults += _tensor_faults(specification["tensors"], hashes(model))
    kept = load_file(logits)
    bf16 = bool(specification["load"]["bf16"])
    rows, positions = specification["rows"], specification["positions"]
    again = last_logits(model, rows, positions, bf16)
    live = [kept[f"row-{index}"] for index in range(len(rows))]
    difference = max((a - b).abs().max().item() for a, b in zip(live, again, strict=True))
    bound = specification["bound"]
    # Written so that a NaN, which compares false with everything, is a fault.
    if not difference <= bound:
        faults.append(f"logits differ by up to {difference:.3g} from the live model's, allowed is {bound:.3g}")
    found = {
        "passed": not faults,
        "faults": faults,
        "rows": len(rows),
        "positions": sum(len(row) for row in live),
        "difference": difference,
        "bound": bound,
        "tensors": len(specification["tensors"]),
        "logit_spread": torch.cat([row.flatten() for row in live]).std().item(),
    }
    if specification["kind"] == "adapter":
        with model.disable_adapter():
            base = last_logits(model, rows, positions, bf16)
        found["adapter_effect"] = max((a - b).abs().max().item() for a, b in zip(live, base, strict=True))
    return found, model


def settings_of(load: dict[str, Any]) -> dict[str, Any]:
    """Settings of `from_pretrained` that make a model as the live one was."""
    import torch

    settings: dict[str, Any] = {
        "dtype": getattr(torch, load["dtype"]),
        "attn_implementation": load["attn_implementation"],
        "trust_remote_code": load["trust_remote_code"],
        "local_files_only": True,
        "use_safetensors": True,
    }
    if load["device"] != "cpu":
        settings["device_map"] = {"": int(load["device"].partition(":")[2] or 0)}
    return settings


def quantize(specification: dict[str, Any], output: Path) -> None:
    """Make the quantised model of `output/model`, as Transformers reloads it."""
    from trainers.quantize import save_quantised

    load = specification["load"]
    save_quantised(output / "model", output / specification["artifact"], load["torchao"], settings_of(load))


def reload(specification: dict[str, Any], output: Path, faults: list[str]) -> Any:
    """Load the artifact as a user would; missing and unexpected weights are added to `faults`."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from trainers.model import exact_on_cpu

    load, artifact = specification["load"], output / specification["artifact"]
    settings = settings_of(load)
    is_adapter = specification["kind"] == "adapter"
    if is_adapter and load["quantization"]:
        settings["quantization_config"] = BitsAndBytesConfig(**load["quantization"])
    source = specification["base"] if is_adapter else artifact
    model, report = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **settings)
    exact_on_cpu(model)
    if not is_adapter:
        for word in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            faults += _listed(f"{word.partition('_')[0]} weights", sorted(str(key) for key in report[word]))
        if "torchao" in load:
            from trainers.quantize import torchao_layers

            trained, seen = set(load["torchao"]["layers"]), set(torchao_layers(model))
            faults += _listed("layers are not quantised", sorted(trained - seen))
            faults += _listed("layers are quantised untrained", sorted(seen - trained))
        return model
    from peft import PeftModel
    from safetensors import safe_open

    from trainers.adapter_state import adapter_state

    _make_room(model, specification)

    model = PeftModel.from_pretrained(model, artifact, autocast_adapter_dtype=not load["quantization"])
    with safe_open(artifact / "adapter_model.safetensors", framework="pt") as file:
        saved = set(file.keys())
    wanted = set(adapter_state(model))
    faults += _listed("missing weights", sorted(wanted - saved)) + _listed("unexpected weights", sorted(saved - wanted))
    return model


def _make_room(model: Any, specification: dict[str, Any]) -> None:
    """Rows for added tokens, as `AutoPeftModelForCausalLM` makes them: their values come with the adapter."""
    rows = specification["load"]["vocabulary"]
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)


def _tensor_faults(live: dict[str, str], saved: dict[str, str]) -> list[str]:
    changed = sorted(name for name in live if name in saved and live[name] != saved[name])
    missing = sorted(set(live) - set(saved))
    return _listed("weights not as trained", changed) + _listed("weights not saved", missing)


def _listed(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"] if names else []


def merge(model: Any, specification: dict[str, Any], output: Path) -> None:
    """Merge the proved adapter into its base and save `output/model`; a 4-bit base is dequantised first."""
    target, temporary = output / "model", output / ".model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    if specification["load"]["quantization"]:
        model = _on_dequantised_base(model, specification, output)
    merged = model.merge_and_unload(safe_merge=True)
    merged.save_pretrained(temporary)
    for path in (output / "adapter").iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.startswith("adapter_"):
            shutil.copy2(path, temporary / path.name)
    shutil.rmtree(target, ignore_errors=True)
    temporary.replace(target)


def _on_dequantised_base(model: Any, specification: dict[str, Any], output: Path) -> Any:
    """The adapter on the very weights it was trained with: the 4-bit ones, written out in full."""
    import torch
    from peft import PeftModel

    base = model.unload().dequantize()
    base = base.to(getattr(torch, specification["load"]["dtype"]))
    return PeftModel.from_pretrained(base, output / specification["artifact"])


def summary(kind: str, found: dict[str, Any]) -> str:
    """One line for a person."""
    if found["passed"]:
        return (
            f"proof of the {kind}: passed. {found['rows']} rows, {found['positions']} positions, largest difference of a "
            f"logit {found['difference']:.2g} (allowed {found['bound']:.2g})"
        )
    return f"proof of the {kind}: FAILED. " + "; ".join(found["faults"])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the interpreter's clean-up of torch takes a second and adds nothing
