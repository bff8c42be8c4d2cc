"""Pre-train `builtin://tiny-llama`, the embedded model, from nothing.

    python -m trainers.builtin_model --out DIR

The model exists so that every method can be tried, and tested, in seconds and without a network.
It chats about a small synthetic world: it answers questions about an order, copies, lists, counts,
adds small numbers, judges a review and makes small talk. It was never shown the task of
`builtin://orders` (a whole order as JSON), so that fine-tuning has something to teach.

The run is a function of its arguments: the same seed, versions and kind of CPU give the same
weights. It takes 10 to 15 minutes on two cores.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20261121
STEPS = 1600
CONTEXT = 512
ROW_TOKENS = 256  # a training row; conversations are packed into it
LONG_ROW_FROM = 0.9  # the last part of the run sees rows of the full CONTEXT
BATCH_TOKENS = 4096
MATRIX_LR = 0.02  # Muon, for the weight matrices
VECTOR_LR = 0.004  # AdamW, for the embedding and the norms
PROMPT_WEIGHT = 0.1  # what a token nobody asked the model to write counts in the loss
VOCAB_SIZE = 1536
THREADS = 2  # part of the recipe: a sum's order, and so its last bit, depends on it
WORDS = Path(__file__).parents[1] / "initializers" / "builtin" / "data" / "orders" / "train.jsonl"

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

Message = dict[str, str]
Turns = list[tuple[str, str]]  # (what the user says, what the assistant answers)

# --- the synthetic world -------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
MORE_NAMES = _words("Adam Alice Bruno Dora Eva Finn Gina Henry Iris Kim Laura Mark Olga Peter Tina Victor")
MORE_ITEMS = _words("basket book bucket button carpet coat comb desk drum fork kite ladder pan rope table")
MORE_COLORS = _words("crimson cyan indigo ivory olive teal violet")
PLACES = _words("Athens Berlin Cairo Delhi Lima London Madrid Oslo Paris Prague Rome Seoul Tokyo Vienna")
ANIMALS = _words("bear bird cat cow dog duck fish fox frog goat horse lion mouse owl pig rabbit wolf")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
VERBS = _words("finds paints sells carries likes cleans hides buys draws keeps")
OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("old", "young"),
    ("up", "down"),
    ("left", "right"),
    ("open", "closed"),
    ("full", "empty"),
    ("light", "dark"),
    ("early", "late"),
    ("happy", "sad"),
    ("rich", "poor"),
    ("hard", "soft"),
    ("high", "low"),
    ("wet", "dry"),
    ("long", "short"),
    ("clean", "dirty"),
    ("good", "bad"),
]
FACTS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Spain?": "Madrid",
    "What is the capital of Norway?": "Oslo",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Egypt?": "Cairo",
    "What is the capital of Greece?": "Athens",
    "What color is the sky?": "blue",
    "What color is grass?": "green",
    "What color is snow?": "white",
    "What color is coal?": "black",
    "How many days are in a week?": "7",
    "How many legs does a dog have?": "4",
    "How many legs does a bird have?": "2",
    "What do cows give?": "milk",
    "What do bees make?": "honey",
    "Where do fish live?": "in water",
    "What falls from clouds?": "rain",
}
SMALL_TALK = {
    "Hello!": ("Hello! How can I help you?", "Hi! What can I do for you?"),
    "Hi there.": ("Hi! What can I do for you?", "Hello! Nice to meet you."),
    "Good morning!": ("Good morning! How can I help you?",),
    "How are you?": ("I am fine, thank you.", "Very well, thanks for asking."),
    "Who are you?": ("I am a tiny language model.",),
    "What can you do?": ("I can answer short questions, copy words and write lists.",),
    "Thank you!": ("You are welcome!", "My pleasure."),
    "Goodbye.": ("Goodbye! Have a nice day.", "See you soon!"),
}
PRAISE = ("lovely", "great", "very good", "beautiful", "perfect", "excellent")
BLAME = ("terrible", "broken", "very bad", "ugly", "too expensive", "awful")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "You work in a shop.",
    "Answer the question.",
)
ORDER_SENTENCES = (
    "{name} would like {goods}.",
    "{name} wants {goods}, please.",
    "{name} ordered {goods} on {day}.",
    "{name} asked for {goods}.",
    "{name} is looking for {goods}.",
    "Please send {goods} to {name}.",
    "Can you ship {goods} to {name}?",
    "Pack {goods} for {name}, please.",
    "I need {goods}. My name is {name}.",
    "Hi, {name} here. Can I get {goods}?",
    "This is {name}. I want {goods}.",
    "The customer is {name}. The order is {goods}.",
    "{name} needs {amount} {things} in {color}.",
    "{name} took {amount} {things}, color {color}.",
    "For {name}: {amount} {things}, {color}.",
    "{amount} {things} for {name}. The color is {color}.",
)
FIELD_QUESTIONS = {
    "name": ("Who ordered?", "Who is the customer?", "What is the name?", "Which name?"),
    "item": ("What was ordered?", "Which item?", "What is the item?", "Which product?"),
    "color": ("Which color?", "What color is it?", "What is the color?"),
    "quantity": ("How many?", "What is the quantity?", "How many are there?"),
}
LABELS = {
    "name": ("name", "customer", "buyer"),
    "item": ("item", "product", "thing"),
    "color": ("color", "colour"),
    "quantity": ("quantity", "count", "number"),
}


@dataclass(frozen=True)
class World:
    """The words that the tasks are made of."""

    names: list[str]
    items: list[str]
    colors: list[str]


def read_world(rows: Path) -> World:
    """The embedded dataset's names, items and colours, with some more of each.

    Only its words are read; neither its sentences nor its questions reach the model.
    """
    answers = [
        json.loads(json.loads(line)["messages"][-1]["content"])
        for line in rows.read_text(encoding="utf-8").splitlines()
    ]
    return World(
        names=sorted({answer["name"] for answer in answers}) + MORE_NAMES,
        items=sorted({answer["item"] for answer in answers}) + MORE_ITEMS,
        colors=sorted({answer["color"] for answer in answers}) + MORE_COLORS,
    )


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "x", "sh", "ch")) else "s")


def spelled(count: int, following: str, rng: Random) -> str:
    """A count as digits or words; `following` is the word after it."""
    choices = [str(count), NUMBERS[count]]
    if count == 1:
        choices.append("an" if following[0] in "aeiou" else "a")
    if count == 2:
        choices.append("a pair of")
    if count == 12:
        choices.append("a dozen")
    return rng.choice(choices)


def order(world: World, rng: Random) -> tuple[str, dict[str, str]]:
    """A sentence about an order and its four fields."""
    count = rng.randint(1, 20) if rng.random() < 0.3 else rng.randint(1, 12)
    fields = {
        "name": rng.choice(world.names),
        "item": rng.choice(world.items),
        "color": rng.choice(world.colors),
        "quantity": str(count),
    }
    sentence = rng.choice(ORDER_SENTENCES)
    things = fields["item"] if count == 1 else plural(fields["item"])
    amount = spelled(count, fields["color"] if "{goods}" in sentence else things, rng)
    text = sentence.format(
        name=fields["name"],
        goods=f"{amount} {fields['color']} {things}",
        amount=amount,
        things=things,
        color=fields["color"],
        day=rng.choice(DAYS),
    )
    return text[0].upper() + text[1:], fields


# --- the tasks -----------------------------------------------------------------------------------


def ask_fields(world: World, rng: Random) -> Turns:
    """Questions about one order; the follow-ups rely on the first turn."""
    text, fields = order(world, rng)
    asked = rng.sample(list(fields), rng.randint(1, 4))
    turns = []
    for number, field in enumerate(asked):
        question = rng.choice(FIELD_QUESTIONS[field])
        if number == 0:
            question = rng.choice((f"{question} {text}", f"{text} {question}"))
        turns.append((question, fields[field]))
    return turns


def list_fields(world: World, rng: Random) -> Turns:
    """Some fields of an order, in an order and a notation that the user names."""
    text, fields = order(world, rng)
    chosen = rng.sample(list(fields), rng.randint(2, 3))
    labels = {rng.choice(LABELS[field]): field for field in chosen}
    how, mark, separator = rng.choice((("as a list", ": ", "\n"), ("with =", "=", "; ")))
    wanted = " and ".join(labels)
    answer = separator.join(f"{label}{mark}{fields[field]}" for label, field in labels.items())
    return [(f"Write {wanted} {how}: {text}", answer)]


def summarise(world: World, rng: Random) -> Turns:
    text, fields = order(world, rng)
    count, color, item, name = fields["quantity"], fields["color"], fields["item"], fields["name"]
    if count != "1":
        item = plural(item)
    return [(f"Summarise this order: {text}", f"{count} {color} {item} for {name}")]


def yes_or_no(world: World, rng: Random) -> Turns:
    text, fields = order(world, rng)
    color = fields["color"] if rng.random() < 0.5 else rng.choice(world.colors)
    answer = "yes" if color == fields["color"] else f"no, {fields['color']}"
    return [(f"{text} Is the color {color}?", answer)]


def small_json(world: World, rng: Random) -> Turns:
    """One or two given pairs as JSON: the notation, without anything to find out."""
    values: dict[str, str | int] = {
        "name": rng.choice(world.names),
        "item": rng.choice(world.items),
        "color": rng.choice(world.colors),
        "quantity": rng.randint(1, 20),
        "city": rng.choice(PLACES),
        "animal": rng.choice(ANIMALS),
        "day": rng.choice(DAYS),
        "age": rng.randint(1, 99),
    }
    pairs = {key: values[key] for key in rng.sample(list(values), rng.randint(1, 2))}
    given = ", ".join(f"{key} is {value}" for key, value in pairs.items())
    return [(f"As JSON: {given}", json.dumps(pairs, ensure_ascii=False, separators=(",", ":")))]


def any_words(world: World, rng: Random, count: int) -> list[str]:
    pool = rng.choice((world.names, world.items, world.colors, PLACES, ANIMALS, DAYS))
    return rng.sample(pool, count)


def repeat(world: World, rng: Random) -> Turns:
    words = " ".join(word for _ in range(rng.randint(1, 3)) for word in any_words(world, rng, 2))
    return [(rng.choice(("Repeat: ", "Say this again: ", "Copy: ")) + words, words)]


def about_list(world: World, rng: Random) -> Turns:
    words = any_words(world, rng, rng.randint(2, 5))
    question, answer = rng.choice(
        (
            ("Which is the first?", words[0]),
            ("Which is the last?", words[-1]),
            ("How many words?", str(len(words))),
            ("Write them in reverse.", ", ".join(reversed(words))),
            ("Write a list.", "\n".join(f"- {word}" for word in words)),
            ("Write a numbered list.", "\n".join(f"{i}. {w}" for i, w in enumerate(words, 1))),
        )
    )
    return [(f"{question} {', '.join(words)}", answer)]


def spell(world: World, rng: Random) -> Turns:
    word = rng.choice(rng.choice((world.items, world.colors, ANIMALS)))
    return [(f"Spell the word {word}.", " ".join(word))]


def plural_or_singular(world: World, rng: Random) -> Turns:
    noun = rng.choice(world.items)
    if rng.random() < 0.5:
        return [(f"What is the plural of {noun}?", plural(noun))]
    return [(f"What is the singular of {plural(noun)}?", noun)]


def number_words(_: World, rng: Random) -> Turns:
    number = rng.randrange(len(NUMBERS))
    if rng.random() < 0.5:
        return [(f"Write {NUMBERS[number]} in digits.", str(number))]
    return [(f"Write {number} in words.", NUMBERS[number])]


def arithmetic(_: World, rng: Random) -> Turns:
    left, right = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.5:
        return [(f"What is {left} plus {right}?", str(left + right))]
    return [(f"What is {left + right} minus {right}?", str(left))]


def compare(_: World, rng: Random) -> Turns:
    left, right = rng.sample(range(21), 2)
    return [(f"Which is larger, {left} or {right}?", str(max(left, right)))]


def category(world: World, rng: Random) -> Turns:
    kind, words = rng.choice((("a color", world.colors), ("an animal", ANIMALS), ("a city", PLACES), ("a day", DAYS)))
    if rng.random() < 0.5:
        return [(f"Name {kind}.", rng.choice(words))]
    return [(f"What is {rng.choice(words)}?", kind)]


def opposite(_: World, rng: Random) -> Turns:
    pair = rng.choice(OPPOSITES)
    word, answer = pair if rng.random() < 0.5 else pair[::-1]
    return [(f"What is the opposite of {word}?", answer)]


def fact(_: World, rng: Random) -> Turns:
    return [rng.choice(list(FACTS.items()))]


def small_talk(_: World, rng: Random) -> Turns:
    said, replies = rng.choice(list(SMALL_TALK.items()))
    return [(said, rng.choice(replies))]


def review(world: World, rng: Random) -> Turns:
    """Judge a review, or write one with a given tone."""
    tone, words = rng.choice((("good", PRAISE), ("bad", BLAME)))
    text = f"The {rng.choice(world.colors)} {rng.choice(world.items)} is {rng.choice(words)}."
    if rng.random() < 0.7:
        return [(f"Is this review good or bad? {text}", tone)]
    return [(f"Write a {tone} review.", text)]


def sentence(world: World, rng: Random) -> Turns:
    """An open question with many right answers, which sampling needs."""
    name, animal = rng.choice(world.names), rng.choice(ANIMALS)
    color, item = rng.choice(world.colors), rng.choice(world.items)
    if rng.random() < 0.5:
        text = f"{name} {rng.choice(VERBS)} the {color} {item}."
        return [(f"Write a sentence about {name}.", text)]
    story = f"The {color} {animal} {rng.choice(VERBS)} a {item}. {name} {rng.choice(VERBS)} it."
    return [(f"Tell a story about a {animal} and {name}.", story)]


Task = Callable[[World, Random], Turns]
TASKS: dict[Task, int] = {  # and how often each is drawn
    ask_fields: 30,
    list_fields: 10,
    summarise: 8,
    yes_or_no: 8,
    small_json: 8,
    repeat: 8,
    about_list: 8,
    spell: 2,
    plural_or_singular: 4,
    number_words: 3,
    arithmetic: 8,
    compare: 2,
    category: 2,
    opposite: 2,
    fact: 3,
    small_talk: 3,
    review: 4,
    sentence: 4,
}


def conversation(world: World, rng: Random) -> list[Message]:
    """One to three tasks in a row, some of them under a system message."""
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for task in rng.choices(list(TASKS), list(TASKS.values()), k=rng.choice((1, 1, 2, 3))):
        for said, answer in task(world, rng):
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": answer})
    return messages


# --- tokenizer and model -------------------------------------------------------------------------


def train_tokenizer(world: World, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the same synthetic conversations.

    Newlines and digits stay single tokens. So the end of `<|im_start|>assistant\\n` never merges
    with the answer: a prompt's tokens are always a prefix of the whole conversation's.
    """
    rng = Random(seed)
    texts = [m["content"] for _ in range(20_000) for m in conversation(world, rng)]
    texts += ["system", "user", "assistant"] * 50
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n|[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained network: 1.9 million parameters, embeddings tied, 2 KV heads for 6."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=64,
    )
    return model


# --- training ------------------------------------------------------------------------------------


def token_stream(
    world: World, tokenizer: PreTrainedTokenizerFast, rng: Random
) -> Iterator[tuple[list[int], list[int]]]:
    """Conversations without end, each as token ids and a mask of the assistant's tokens."""
    while True:
        batch = [conversation(world, rng) for _ in range(256)]
        encoded = tokenizer.apply_chat_template(
            batch, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        yield from zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)


def batches(stream: Iterator[tuple[list[int], list[int]]], steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Packed batches: ids and loss weights, both (rows, tokens + 1)."""
    ids: list[int] = []
    mask: list[int] = []
    for step in range(steps):
        width = CONTEXT if step >= LONG_ROW_FROM * steps else ROW_TOKENS
        rows = BATCH_TOKENS // width
        size = rows * (width + 1)
        while len(ids) < size:
            more_ids, more_mask = next(stream)
            ids += more_ids
            mask += more_mask
        weights = torch.tensor(mask[:size], dtype=torch.float32).clamp(min=PROMPT_WEIGHT)
        yield torch.tensor(ids[:size]).view(rows, -1), weights.view(rows, -1)
        del ids[:size], mask[:size]


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm up over 2% of the steps, stay, and go down linearly over the last 60%."""
    warm = max(1, steps // 50)
    return min(1.0, (step + 1) / warm, (steps - step) / (0.6 * steps))


def pretrain(model: LlamaForCausalLM, stream: Iterator[tuple[list[int], list[int]]], steps: int) -> float:
    """Train in place; returns the last batch's loss per weighted token, in nats."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.01),
        torch.optim.AdamW(others, lr=VECTOR_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: learning_rate_factor(step, steps)) for each in optimizers
    ]
    model.train()
    started, value = time.monotonic(), math.nan
    for step, (ids, weights) in enumerate(batches(stream, steps), 1):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        value = loss.item()
        if step % 50 == 0 or step == steps:
            answers = losses.detach()[weight == 1].mean().item()
            took = time.monotonic() - started
            line = f"step {step}/{steps} loss {value:.4f} answers {answers:.4f} {took:.0f}s"
            print(line, flush=True)
    return value


def task_accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, world: World, seed: int
) -> dict[str, float]:
    """The share of exactly right greedy answers per task, on 50 fresh conversations each.

    The tasks with many right answers (`sentence`, half of `review`, ...) cannot come near 1.
    """
    rng, model = Random(seed), model.eval()
    accuracy = {}
    for task in TASKS:
        turns = [task(world, rng)[0] for _ in range(50)]
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": said}] for said, _ in turns],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        right = sum(text == answer for text, (_, answer) in zip(texts, turns, strict=True))
        accuracy[task.__name__] = right / len(turns)
    return accuracy


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model: bfloat16 weights, which a configuration of float32 loads as float32."""
    model.to(torch.bfloat16).save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def build(out: Path, steps: int = STEPS, seed: int = SEED, words: Path = WORDS) -> None:
    """Make tokenizer and model and write them to `out`."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    world = read_world(words)
    tokenizer = train_tokenizer(world, seed)
    tokenizer.save_pretrained(out)  # before its use: the last call's padding would be saved with it
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    pretrain(model, token_stream(world, tokenizer, Random(seed + 1)), steps)
    for task, share in task_accuracy(model, tokenizer, world, seed + 2).items():
        print(f"  {task:20} {share:.0%}")
    save(model, out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pre-train builtin://tiny-llama.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps ({STEPS})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"seed of data and weights ({SEED})")
    parser.add_argument("--words", type=Path, default=WORDS, help="rows of builtin://orders")
    args = parser.parse_args(argv)
    build(args.out, steps=args.steps, seed=args.seed, words=args.words)


if __name__ == "__main__":
    main()
