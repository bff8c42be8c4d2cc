"""Which tokens carry loss: exactly the answers and their end, for templates with and without marks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from initializers_kit import (
    ANSWER,
    CHAT,
    CHATML,
    CHATML_MARKED,
    QUESTION,
    environment,
    manifest,
    prepare,
    recipe_file,
    sequences,
    step,
    texts,
    tiny_model,
    write_jsonl,
)

from blueprints.errors import DataError, RowsError, UsageError
from initializers.packing import best_fit_decreasing

THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LONG_CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief. 🙂"},
        {"role": "user", "content": "Größe?"},
        {"role": "assistant", "content": "5 m 🎈"},
        {"role": "user", "content": "And\nnow?"},
        {"role": "assistant", "content": "6 m"},
    ]
}


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["prefixes", "marks"])
def test_all_answers_of_a_chat_carry_loss(tmp_path: Path, template: str) -> None:
    prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [LONG_CHAT, CHAT]), template=template)
    trained = [answer for _, answer in texts(tmp_path / "work")]
    assert trained == ["5 m 🎈<|im_end|>6 m<|im_end|>", "Paris.<|im_end|>"]


def test_the_mask_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    rows = [LONG_CHAT, CHAT]
    prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "model")
    for row, ours in zip(rows, sequences(tmp_path / "work"), strict=True):
        theirs = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ours == {"input_ids": theirs["input_ids"], "completion_mask": theirs["assistant_masks"]}


def test_marks_and_prefixes_agree(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [LONG_CHAT, CHAT])
    prepare(tmp_path, rows, template=CHATML)
    plain = sequences(tmp_path / "work")
    prepare(tmp_path, rows, template=CHATML_MARKED)
    assert sequences(tmp_path / "work") == plain


def test_a_template_that_rewrites_earlier_turns_gives_one_sequence_per_answer(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [LONG_CHAT, CHAT]), template=THINKING)
    assert prepared["splits"]["train"]["rows"] == 2
    assert prepared["splits"]["train"]["sequences"] == 3
    found = texts(tmp_path / "work")
    assert [answer for _, answer in found] == [
        "<think>\n\n</think>\n\n5 m 🎈<|im_end|>",
        "<think>\n\n</think>\n\n6 m<|im_end|>",
        "<think>\n\n</think>\n\nParis.<|im_end|>",
    ]
    assert "assistant\n5 m 🎈<|im_end|>\n<|im_start|>user" in found[1][0]


def test_a_template_that_asks_for_something_else_is_refused(tmp_path: Path) -> None:
    asks = CHATML.replace("{{ '<|im_start|>assistant\n' }}{% endif %}", "{{ '<|im_start|>bot\n' }}{% endif %}")
    with pytest.raises(RowsError, match=r"no exact mask.*bot"):
        prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT]), template=asks)


def test_a_template_may_refuse_a_row(tmp_path: Path) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    with pytest.raises(RowsError, match=r"rows\.jsonl:2.*no system role"):
        prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT, LONG_CHAT]), template=strict)


@pytest.mark.parametrize(
    "body", ["{{ 1 / 0 }}", "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ messages[9].role }}"]
)
def test_a_template_that_breaks_down_is_the_rows_fault(tmp_path: Path, body: str) -> None:
    with pytest.raises(RowsError, match=r"rows\.jsonl:1: messages: the chat template does not take it"):
        prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT]), template=body + CHATML)


def test_marks_without_the_end_token_are_extended(tmp_path: Path) -> None:
    marks = CHATML_MARKED.replace(
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
        "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
    )
    assert marks != CHATML_MARKED
    prepared = prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT]), template=marks)
    assert texts(tmp_path / "work")[0][1] == "Paris.<|im_end|>"
    assert prepared["notes"]["extended"] == 1


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["prefixes", "marks"])
def test_prompt_messages_and_weight_0_carry_no_loss(tmp_path: Path, template: str) -> None:
    first, *middle, last = LONG_CHAT["messages"]
    rows = [
        {"prompt": [first, *middle], "completion": [last]},
        {"prompt": [first, middle[0]], "completion": [middle[1] | {"weight": 0}, middle[2], last]},
    ]
    prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows), template=template)
    assert [answer for _, answer in texts(tmp_path / "work")] == ["6 m<|im_end|>"] * 2


def test_loss_on_everything_when_asked(tmp_path: Path) -> None:
    prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT]), "sft: {completion_only_loss: false}")
    (row,) = sequences(tmp_path / "work")
    assert row["completion_mask"] == [0] + [1] * (len(row["input_ids"]) - 1)  # nothing predicts the first token


def test_no_double_start_token(tmp_path: Path) -> None:
    with_bos = "{{ bos_token }}" + CHATML
    prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT]), template=with_bos, bos=True)
    assert texts(tmp_path / "work")[0][0].count("<s>") == 1
    twice = "{{ bos_token }}{{ bos_token }}" + CHATML
    with pytest.raises(DataError, match="twice"):
        prepare(tmp_path, write_jsonl(tmp_path / "rows2.jsonl", [CHAT]), template=twice, bos=True)
    prepare(tmp_path, write_jsonl(tmp_path / "text.jsonl", [{"text": "<s>hello<|im_end|>"}]), bos=True)
    assert texts(tmp_path / "work")[0][0] == "<s>hello<|im_end|>"


def test_a_tokenizer_that_loses_text_stops(tmp_path: Path) -> None:
    tiny_model(tmp_path / "work" / "model")
    path = tmp_path / "work" / "model" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(data))
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT])
    with pytest.raises(DataError, match="do not decode to the text"):
        step("dataset", environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path)))


def test_a_tokenizer_beyond_the_models_vocabulary_stops(tmp_path: Path) -> None:
    tiny_model(tmp_path / "work" / "model")
    (tmp_path / "work/model/config.json").write_text('{"model_type": "llama", "vocab_size": 100}')
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT])
    with pytest.raises(DataError, match="outside the model's vocabulary"):
        step("dataset", environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path)))


def test_a_template_that_is_no_jinja(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT])
    with pytest.raises(DataError, match="not a Jinja template"):
        prepare(tmp_path, rows, template="{% for x %}")
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path))
    with pytest.raises(UsageError, match=r"model\.chat_template: not a Jinja template"):
        step("dataset", env | {"BLUEPRINTS_OVERRIDES": json.dumps(['model.chat_template="{% for x %}"'])})


def test_a_template_that_leaves_something_out_is_refused(tmp_path: Path) -> None:
    blind = CHATML.replace("m['content']", "(m['content'][0]['text'] if m['content'] is not string else '')")
    with pytest.raises(RowsError, match="leaves out the user's message 0"):
        prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT]), template=blind)


TEMPLATES = sorted(
    path
    for path in (Path(importlib.util.find_spec("trl").origin or "").parent / "chat_templates").glob("*.jinja")  # type: ignore[union-attr]
    if not path.stem.endswith("_training")
)


UNASKED = "no exact mask: the template asks with"
REFUSED = {
    "deepseek_r1_distill": UNASKED,
    "deepseekv3": UNASKED,
    "idefics3": "leaves out the user's message",
    "llava_next": "does not take it",
    "nemotron_3_5_lightning": UNASKED,
    "nemotron_3_nano": UNASKED,
    "nemotron_3_super": UNASKED,
    "nemotron_3_ultra": UNASKED,
    "smolvlm": "leaves out the user's message",
}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_of_real_models(tmp_path: Path, path: Path) -> None:
    """Each is either refused with a reason or trains exactly the answers, each once."""
    rows = [
        {"messages": [
            {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."},
        ]}
    ]  # fmt: skip
    data, long = write_jsonl(tmp_path / "rows.jsonl", rows), "training: {max_length: 8192}"
    if path.stem in REFUSED:
        with pytest.raises(RowsError, match=REFUSED[path.stem]):
            prepare(tmp_path, data, long, template=path.read_text(), bos=True)
        return
    prepare(tmp_path, data, long, template=path.read_text(), bos=True)
    trained = "".join(answer for _, answer in texts(tmp_path / "work"))
    assert trained.count("Hello!") == trained.count("Four.") == 1
    assert "Hi there" not in trained
    assert "2+2?" not in trained


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}" + CHATML.replace(
        "m['content'] + '<|im_end|>\n'",
        "m['content'] + ((m.tool_calls[0].function.arguments | tojson) if m.tool_calls else '') + '<|im_end|>\n'",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "It is 2"},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
    }
    prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]), template=template)
    ((text, trained),) = texts(tmp_path / "work")
    assert text.startswith('[{"type": "function"')
    assert trained == '{"x": 1}<|im_end|>It is 2<|im_end|>'


# --- packing -----------------------------------------------------------------------------------------


@given(st.integers(1, 50).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=200))))
def test_packing_holds_every_document_once_and_whole(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in members) for members in bins]
    assert all(size <= capacity for size in sizes)
    assert len(bins) <= max(1, 2 * -(-sum(lengths) // capacity)) or not lengths  # never half empty on the whole
    assert bins == best_fit_decreasing(lengths, capacity)


def test_a_document_that_fits_no_bin() -> None:
    with pytest.raises(ValueError, match="document 1 has 9 tokens"):
        best_fit_decreasing([1, 9], 8)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_packed_sequences_are_the_unpacked_ones(tmp_path: Path, sizes: list[int]) -> None:
    data = [{"prompt": "p", "completion": "x" * size} for size in sizes]
    rows = write_jsonl(tmp_path / "rows.jsonl", data)
    prepare(tmp_path, rows, "training: {max_length: 128}")
    plain = sorted((row["input_ids"], row["completion_mask"]) for row in sequences(tmp_path / "work"))
    prepared = prepare(tmp_path, rows, "training: {max_length: 128}\nsft: {packing: true}")
    packed, documents = sequences(tmp_path / "work"), []
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["completion_mask"]) <= 128
        start = 0
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            documents.append((row["input_ids"][part], row["completion_mask"][part]))
            start += length
    assert sorted(documents) == plain
    assert prepared["splits"]["train"]["tokens"] == sum(len(ids) for ids, _ in plain)


def test_the_eval_split_is_never_packed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "src/train.jsonl", [CHAT] * 9)
    write_jsonl(tmp_path / "src/test.jsonl", [CHAT] * 9)
    prepare(tmp_path, tmp_path / "src", "sft: {packing: true}")
    assert len(sequences(tmp_path / "work")) == 1
    assert len(sequences(tmp_path / "work", "eval")) == 9
    assert "seq_lengths" not in sequences(tmp_path / "work", "eval")[0]


def test_shards_open_as_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    from initializers import shards

    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    monkeypatch.setattr(shards, "BATCH_ROWS", 10)
    prepared: dict[str, Any] = prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 200))
    listed = prepared["splits"]["train"]["shards"]
    assert len(listed) > 1
    assert sum(item["sequences"] for item in listed) == 200
    directory = tmp_path / "work/dataset/prepared/train"
    opened = [Dataset.from_file(str(directory / item["path"])) for item in listed]
    assert [len(part) for part in opened] == [item["sequences"] for item in listed]
    assert opened[0][0] == sequences(tmp_path / "work")[0]
    types = opened[0].features
    assert (types["input_ids"].feature.dtype, types["completion_mask"].feature.dtype) == ("int32", "int8")
    assert manifest(tmp_path / "work")["prepared"]["vocab_size"] == 260


@pytest.mark.parametrize("completion_only", ["true", "false"])
def test_held_out_rows_say_what_they_ask_and_where_the_answer_begins(tmp_path: Path, completion_only: str) -> None:
    from transformers import AutoTokenizer

    for split in ("train", "test"):
        write_jsonl(tmp_path / "rows" / f"{split}.jsonl", [CHAT] * 2)
    prepare(tmp_path, tmp_path / "rows", f"sft: {{completion_only_loss: {completion_only}}}")
    row: Any = sequences(tmp_path / "work", "eval")[0]
    assert row["prompt"] == QUESTION
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "model")
    assert tokenizer.decode(row["input_ids"][row["prompt_length"] :]) == f"{ANSWER}<|im_end|>\n"
    assert "prompt" not in sequences(tmp_path / "work")[0]
