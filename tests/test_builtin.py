"""The embedded model and dataset: what `builtin://tiny-llama` and `builtin://orders` promise."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from initializers.builtin import DATASETS, MODELS, dataset_path, model_path
from initializers.builtin.generate_data import GENERATORS, main
from initializers.builtin.orders import NUMBER_WORDS, generate
from initializers.settings import Request
from initializers.sources.builtin import BuiltinSource

ROOT = Path(__file__).parents[1]
Rows = list[list[dict[str, str]]]


def read_rows(split: str) -> Rows:
    text = (dataset_path("orders") / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_path("tiny-llama"))


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # enough for this model, and no quarrel with tests that run beside it
    yield transformers.AutoModelForCausalLM.from_pretrained(model_path("tiny-llama"))
    torch.set_num_threads(threads)


def answers(model: Any, tokenizer: Any, chats: Rows, **settings: Any) -> list[str]:
    """Greedy answers to chats that end with the user's message."""
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, **settings)
    new = output[:, inputs["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(new, skip_special_tokens=True)
    return texts


# --- names ---------------------------------------------------------------------------------------


def test_every_listed_name_is_a_folder_with_content() -> None:
    for folder in (*MODELS.values(), *DATASETS.values()):
        assert any(folder.iterdir())


@pytest.mark.parametrize(
    ("find", "known"),
    [(model_path, "builtin://tiny-llama"), (dataset_path, "builtin://orders")],
)
def test_an_unknown_name_is_answered_with_the_known_ones(find: Any, known: str) -> None:
    with pytest.raises(LookupError, match=known) as caught:
        find("tiny-lama")
    assert "builtin://tiny-lama" in str(caught.value)


# --- dataset -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
def test_generators_reproduce_the_committed_files(name: str) -> None:
    files = GENERATORS[name]()
    assert files == GENERATORS[name]()
    assert {path.name for path in dataset_path(name).iterdir()} == set(files)
    for file, text in files.items():
        assert (dataset_path(name) / file).read_bytes() == text.encode()


@pytest.mark.parametrize("name", DATASETS)
def test_no_row_is_in_both_splits_and_files_stay_small(name: str) -> None:
    splits = [set((dataset_path(name) / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "test")]
    assert splits[0]
    assert splits[1]
    assert not splits[0] & splits[1]
    assert size(dataset_path(name)) < 1_500_000


def test_check_tells_a_stale_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert main(["--out", str(tmp_path)]) == 0
    assert main(["orders", "--out", str(tmp_path), "--check"]) == 0
    (tmp_path / "orders" / "test.jsonl").write_text("")
    assert main(["--out", str(tmp_path), "--check"]) == 1
    assert "differs: orders/test.jsonl" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["oders"])


def test_another_seed_gives_other_rows() -> None:
    assert generate(seed=1) == generate(seed=1)
    assert generate(seed=1) != generate(seed=2)


def test_splits_have_the_documented_size_and_share_nothing() -> None:
    train, test = read_rows("train"), read_rows("test")
    assert (len(train), len(test)) == (3000, 300)
    for position in (0, 1):  # neither a prompt nor an order
        seen = {row[position]["content"] for row in train}
        assert not seen & {row[position]["content"] for row in test}


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_a_question_and_an_order_as_json(split: str) -> None:
    for user, assistant in read_rows(split):
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        order = json.loads(assistant["content"])
        assert list(order) == ["name", "item", "color", "quantity"]
        assert 1 <= order["quantity"] <= 12
        assert all(order[key] in user["content"] for key in ("name", "item", "color"))
        assert json.dumps(order, ensure_ascii=False, separators=(",", ":")) == assistant["content"]


def test_the_model_stays_small() -> None:
    assert size(model_path("tiny-llama")) <= 4_000_000


# --- tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Anna would like 12 red mugs.",
        "Zoë\n\n  two  spaces\t",
        '{"a":[1,2]}',
        "日本語 🙂",
        "\n a",
        "",
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_is_the_one_its_script_trains(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from trainers.builtin_model import SEED, WORDS, read_world, train_tokenizer

    train_tokenizer(read_world(WORDS), SEED).save_pretrained(tmp_path)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (model_path("tiny-llama") / made.name).read_bytes()


def test_special_tokens_are_distinct(tokenizer: Any) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.model_max_length >= 512


def test_template_renders_chatml_with_a_system_message(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("answer", ["red", " red", "\nred", "7", "Zoë", '{"name":"Anna"}'])
def test_assistant_mask_covers_the_answer_and_the_end_of_turn(tokenizer: Any, answer: str) -> None:
    question = {"role": "user", "content": "Which color?"}
    messages = [question, {"role": "assistant", "content": answer}] * 2
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    trained = [token for token, on in zip(ids, mask, strict=True) if on]
    assert tokenizer.decode(trained) == f"{answer}<|im_end|>" * 2
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[: len(prompt)] == prompt


# --- model ---------------------------------------------------------------------------------------


def test_model_loads_as_float32_without_a_complaint(tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            model_path("tiny-llama"), output_loading_info=True
        )
    assert not any(info.values())
    assert str(model.dtype) == "torch.float32"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 512


def test_model_survives_a_save(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    import torch

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    transformers = pytest.importorskip("transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 60).unsqueeze(0)
    assert torch.equal(model(ids).logits, again(ids).logits)
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.chat_template == tokenizer.chat_template
    assert reloaded("Hello, Zoë!")["input_ids"] == tokenizer("Hello, Zoë!")["input_ids"]


def test_model_answers_its_own_kind_of_question(model: Any, tokenizer: Any) -> None:
    sentence = "Anna would like 3 red mugs."
    expected = {
        f"Who ordered? {sentence}": "Anna",
        f"Which color? {sentence}": "red",
        f"Which item? {sentence}": "mug",
        f"How many? {sentence}": "3",
        "What is the capital of France?": "Paris",
        "Repeat: cat dog": "cat dog",
    }
    chats = [[{"role": "user", "content": question}] for question in expected]
    # A space of 40 tokens: every answer ends long before, by the end-of-turn token alone.
    assert answers(model, tokenizer, chats, max_new_tokens=40) == list(expected.values())


def test_model_cannot_do_the_dataset_yet(model: Any, tokenizer: Any) -> None:
    rows = read_rows("test")[:40]
    got = answers(model, tokenizer, [row[:1] for row in rows], max_new_tokens=48)
    right = sum(text == row[1]["content"] for text, row in zip(got, rows, strict=True))
    assert right / len(rows) < 0.1


# --- the teacher ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded teacher as the initializer leaves it."""
    out = tmp_path_factory.mktemp("teacher")
    request = Request(kind="model", uri="builtin://tiny-llama-orders")
    fetched = BuiltinSource().fetch(request, out, lambda _done, _total: None)
    assert {entry.path for entry in fetched.files} == {path.name for path in out.iterdir()}
    return out


def test_teacher_is_the_model_with_its_adapter(teacher: Path, model: Any) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import load_file

    assert size(model_path("tiny-llama-orders")) < 300_000
    found, info = transformers.AutoModelForCausalLM.from_pretrained(teacher, output_loading_info=True)
    assert not any(info.values())
    adapter = load_file(model_path("tiny-llama-orders") / "adapter.safetensors")
    weights, changed = dict(model.named_parameters()), 0
    for name, weight in found.named_parameters():
        update = torch.zeros_like(weight)
        if f"{name}.A" in adapter:
            changed += 1
            update = 2.0 * adapter[f"{name}.B"].double() @ adapter[f"{name}.A"].double()
        torch.testing.assert_close(weight.double(), (weights[name] + update).double(), rtol=1e-6, atol=1e-6)
    assert changed == 28  # seven matrices in each of four layers


def test_teacher_can_do_the_dataset(teacher: Path, tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    rows = read_rows("test")[:60]
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    got = answers(model, tokenizer, [row[:1] for row in rows], max_new_tokens=48)
    right = sum(text == row[1]["content"] for text, row in zip(got, rows, strict=True))
    assert right / len(rows) >= 0.95


@pytest.mark.slow
def test_teacher_is_made_by_its_script(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    command = [sys.executable, "-m", "trainers.builtin_teacher", "--out", str(tmp_path / "adapter.safetensors")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=1200)
    made = load_file(tmp_path / "adapter.safetensors")
    committed = load_file(model_path("tiny-llama-orders") / "adapter.safetensors")
    assert made.keys() == committed.keys()
    for name in {key.rpartition(".")[0] for key in committed}:
        ours, theirs = (each[f"{name}.B"].float() @ each[f"{name}.A"].float() for each in (made, committed))
        # Other processors round otherwise, and the steps carry that on.
        assert torch.linalg.norm(ours - theirs) <= 0.1 * torch.linalg.norm(theirs)


@pytest.mark.slow
def test_pretraining_is_reproducible(tmp_path: Path) -> None:
    for out in ("a", "b"):
        command = [sys.executable, "-m", "trainers.builtin_model", "--steps", "12", "--out"]
        subprocess.run([*command, str(tmp_path / out)], check=True, cwd=ROOT, timeout=600)
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_amounts_ask_for_a_number_word_that_the_prompt_does_not_always_hold() -> None:
    rows = [
        json.loads(line)
        for split in ("train", "test")
        for line in (dataset_path("amounts") / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {row["answer"] for row in rows} == set(NUMBER_WORDS)
    assert len({row["prompt"] for row in rows}) == len(rows)
    spelled = sum(f" {row['answer']} " in f" {row['prompt'].lower()}" for row in rows) / len(rows)
    assert 0.3 < spelled < 0.6, "copying a word of the prompt must not be enough"
