"""Fine-tune `builtin://tiny-llama-orders`, the embedded teacher: tiny-llama with an adapter that has learned the orders.

    python -m trainers.builtin_teacher --out FILE

It writes the adapter alone, in 16 bits: for each adapted matrix `A` and `B`, to be added to tiny-llama's weight as
`SCALE * B @ A`. The initializer does so when the model is fetched (`initializers.sources.builtin`). The run is a function
of its arguments, on one kind of CPU and one set of versions; it takes about three minutes on one core.
"""

import argparse
import json
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

BUILTIN = Path(__file__).parents[1] / "initializers" / "builtin"
BASE, ROWS = BUILTIN / "models" / "tiny-llama", BUILTIN / "data" / "orders" / "train.jsonl"
SEED = 20261121
RANK = 8
ALPHA = 16
SCALE = ALPHA / RANK
STEPS = 800
BATCH = 16
LEARNING_RATE = 4e-3
Row = tuple[list[int], list[int]]


def read_rows(tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Token ids and labels of the training rows: the answer and its end carry loss."""
    rows = []
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        rows.append((ids, [token if on else -100 for token, on in zip(ids, mask, strict=True)]))
    return rows


def padded(rows: list[Row], pad: int) -> dict[str, torch.Tensor]:
    """A batch, padded on the right."""
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }


def train(steps: int) -> dict[str, torch.Tensor]:
    """The adapter's matrices by the name of the weight they are added to, with `.A` or `.B` behind it."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05)
    rows, order = read_rows(tokenizer), Random(SEED)
    for step in range(steps):
        loss = model(**padded(order.sample(rows, BATCH), tokenizer.pad_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)
    found = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            weight, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
            found[f"{weight}.weight.{kind[0]}"] = parameter.detach().half().contiguous()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fine-tune the embedded teacher.")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(train(arguments.steps), arguments.out, metadata={"scale": str(SCALE)})


if __name__ == "__main__":
    main()
