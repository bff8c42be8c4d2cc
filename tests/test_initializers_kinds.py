"""Rows of the methods beside SFT: preferences, prompts for rewards, and the rows of distillation and QAT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from initializers_kit import (
    ANSWER,
    CHAT,
    CHATML,
    CHATML_MARKED,
    METHODS,
    QUESTION,
    manifest,
    prepare_for,
    sequences,
    tiny_model,
    write_jsonl,
)
from transformers import AutoTokenizer

from blueprints.errors import BlueprintError, DataError, RowsError, UsageError
from blueprints.recipe.rows import CUSTOM_FORMATS, FORMATS, KINDS, kind_of
from blueprints.recipe.schema import METHODS as ALL_METHODS
from initializers import formats

ASKED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
WORSE = "Lyon, I think."
USER, BETTER_TURN, WORSE_TURN = (
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
    {"role": "assistant", "content": WORSE},
)
PREFERENCES: dict[str, dict[str, Any]] = {
    "strings": {"prompt": QUESTION, "chosen": ANSWER, "rejected": WORSE},
    "message lists": {"prompt": [USER], "chosen": [BETTER_TURN], "rejected": [WORSE_TURN]},
    "implicit": {"chosen": [USER, BETTER_TURN], "rejected": [USER, WORSE_TURN]},
    "ultrafeedback": {
        "prompt": QUESTION, "chosen": [USER, BETTER_TURN], "rejected": [USER, WORSE_TURN], "messages": [USER, WORSE_TURN],
        "score_chosen": 8.0,
    },
    "mixed": {"prompt": [USER], "chosen": ANSWER, "rejected": [WORSE_TURN]},
    "transcripts": {
        "chosen": f"\n\nHuman: {QUESTION}\n\nAssistant: {ANSWER}",
        "rejected": f"\n\nHuman: {QUESTION}\n\nAssistant: {WORSE}",
    },
    "transcript prompt": {"prompt": f"Human: {QUESTION}\n\nAssistant:", "chosen": f" {ANSWER}", "rejected": WORSE},
    "ranks": {"prompt": QUESTION, "responses": ["Nice.", ANSWER, WORSE], "rank": [2, 1, 3]},
    "scores": {"prompt": QUESTION, "completions": [[WORSE_TURN], [BETTER_TURN]], "scores": [0.1, 0.9]},
    "json text": {"prompt": QUESTION, "responses": json.dumps([WORSE, ANSWER]), "rank": "[2, 1]"},
    "sharegpt turns": {
        "prompt": [{"from": "human", "value": QUESTION}],
        "chosen": [{"from": "gpt", "value": ANSWER}],
        "rejected": [{"from": "gpt", "value": WORSE}],
    },
}  # fmt: skip


def decoded(workspace: Path, row: dict[str, Any]) -> dict[str, str]:
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    return {key: tokenizer.decode(value) for key, value in row.items() if key.endswith("_ids")}


# --- preferences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
@pytest.mark.parametrize("name", PREFERENCES)
def test_every_spelling_of_a_preference(tmp_path: Path, name: str, template: str) -> None:
    prepared = prepare_for(tmp_path, "dpo", [PREFERENCES[name]], template=template)
    assert (prepared["kind"], prepared["format"]) == ("preference", "preference")
    (row,) = sequences(tmp_path / "work")
    assert list(row) == ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert decoded(tmp_path / "work", row) == {
        "prompt_ids": ASKED,
        "chosen_ids": f"{ANSWER}<|im_end|>\n",
        "rejected_ids": f"{WORSE}<|im_end|>\n",
    }


def test_prompt_and_answer_are_the_tokens_of_the_whole_conversation(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    before = [system, USER, BETTER_TURN, {"role": "user", "content": "And of Spain?"}]
    rows = [{"prompt": before, "chosen": "Madrid.", "rejected": "Barcelona."}] * 3
    prepared = prepare_for(tmp_path, "dpo", rows, "dataset.test_size=1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "model")
    for split in ("train", "eval"):
        row = sequences(tmp_path / "work", split)[0]
        for key, answer in (("chosen_ids", "Madrid."), ("rejected_ids", "Barcelona.")):
            whole = [*before, {"role": "assistant", "content": answer}]
            assert row["prompt_ids"] + row[key] == tokenizer.apply_chat_template(whole, return_dict=False)
    assert [row[key] for key in ("prompt", "chosen", "rejected")] == ["And of Spain?", "Madrid.", "Barcelona."]
    report = prepared["splits"]["train"]
    assert report["tokens"] == sum(len(ids) for row in sequences(tmp_path / "work") for ids in row.values())
    assert report["trained_tokens"] == report["tokens"] - sum(
        len(row["prompt_ids"]) for row in sequences(tmp_path / "work")
    )
    assert report["longest"] == max(len(row["prompt_ids"]) + len(row["rejected_ids"]) for row in [row])


def test_a_token_across_the_boundary_belongs_to_both_answers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = tiny_model(tmp_path / "work" / "model", None)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "ab", "<|im_end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('method: dpo\nmodel: "file:///model"\ndataset: "file:///rows"\n')
    from initializers_kit import environment, step

    tokenizer.save(str(model / "tokenizer.json"))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "xa", "chosen": "bc", "rejected": "cc"}])
    step("dataset", environment(tmp_path / "work", rows, recipe=recipe))
    (row,) = sequences(tmp_path / "work")
    assert decoded(tmp_path / "work", row) == {
        "prompt_ids": "x", "chosen_ids": "abc<|im_end|>", "rejected_ids": "acc<|im_end|>"
    }  # fmt: skip
    assert row["chosen_ids"][0] == vocabulary["ab"]
    assert manifest(tmp_path / "work")["prepared"]["notes"]["merged_boundaries"] == 1


def test_preferences_without_a_template(tmp_path: Path) -> None:
    prepare_for(tmp_path, "dpo", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}], template=None, bos=True)
    assert decoded(tmp_path / "work", sequences(tmp_path / "work")[0]) == {
        "prompt_ids": "<s>1+1=", "chosen_ids": "2<|im_end|>", "rejected_ids": "3<|im_end|>"
    }  # fmt: skip
    prepare_for(tmp_path, "dpo", [PREFERENCES["transcripts"]], template=None)
    found = decoded(tmp_path / "work", sequences(tmp_path / "work")[0])
    assert found["prompt_ids"] == f"\n\nHuman: {QUESTION}\n\nAssistant:"
    assert found["chosen_ids"] == f" {ANSWER}<|im_end|>"
    prepare_for(tmp_path, "dpo", [{"chosen": "The sky is blue.", "rejected": "The sky is green."}], template=None)
    found = decoded(tmp_path / "work", sequences(tmp_path / "work")[0])
    assert (found["prompt_ids"], found["rejected_ids"]) == ("The sky is", " green.<|im_end|>")
    with pytest.raises(DataError, match=r"model\.chat_template"):
        prepare_for(tmp_path, "dpo", [PREFERENCES["implicit"]], template=None)


BAD_PREFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "equal": ({"prompt": "p", "chosen": "a", "rejected": " a "}, r"rejected: the two answers are the same"),
    "equal messages": ({"chosen": [USER, BETTER_TURN], "rejected": [USER, BETTER_TURN]}, "rejected: the two answers"),
    "equal transcripts": ({"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nAssistant: b"}, "rejected: the two"),
    "empty": ({"prompt": "p", "chosen": " ", "rejected": "a"}, r'chosen: " " is empty'),
    "missing": ({"prompt": "p", "chosen": "a"}, "rejected: missing"),
    "number": ({"prompt": "p", "chosen": 5, "rejected": "a"}, "chosen: 5 is a number"),
    "empty list": ({"prompt": "p", "chosen": [], "rejected": "a"}, "chosen: the list is empty"),
    "no prompt": ({"chosen": "yes", "rejected": "no"}, "prompt: missing.*do not begin alike"),
    "other prompts": (
        {"chosen": [USER, BETTER_TURN], "rejected": [{"role": "user", "content": "What?"}, WORSE_TURN]},
        r"rejected\[0\]: .*another message",
    ),
    "other lengths": (
        {"chosen": [USER, BETTER_TURN], "rejected": [USER, WORSE_TURN, USER, WORSE_TURN]},
        "rejected: 4 messages, 2 in the chosen",
    ),
    "early difference": (
        {"chosen": [USER, BETTER_TURN, USER, BETTER_TURN], "rejected": [USER, WORSE_TURN, USER, WORSE_TURN]},
        r"rejected\[1\]: .*only the last message may differ",
    ),
    "roles": ({"prompt": [USER, USER], "chosen": "a", "rejected": "b"}, r"prompt\[1\].role: 'user' after user"),
    "user answers": ({"prompt": "p", "chosen": [USER], "rejected": "b"}, r"chosen\[0\].role: 'user' after user"),
    "assistant asks": ({"prompt": [USER, BETTER_TURN], "chosen": "a", "rejected": "b"}, "prompt: the last message"),
    "long answer": (
        {"prompt": "p", "chosen": [BETTER_TURN, USER, BETTER_TURN], "rejected": "b"}, "chosen: an answer of 3 messages"
    ),
    "ends with user": ({"chosen": [USER, BETTER_TURN, USER], "rejected": [USER, WORSE_TURN]}, r"chosen\[2\].role: the last message is the user's"),
    "other question": ({"prompt": "x", "chosen": [USER, BETTER_TURN], "rejected": "b"}, "chosen: the conversation beg"),
    "transcript turn": ({"prompt": "Human: hi", "chosen": "a", "rejected": "b"}, "prompt: the transcript does not end"),
    "empty transcript": (
        {"chosen": "Human: a\n\nAssistant:", "rejected": "Human: a\n\nAssistant: b"}, r"chosen\[1\].*empty"
    ),
    "ranks differ": ({"prompt": "p", "responses": ["a", "b"], "rank": [1]}, "rank: 1 numbers for 2 answers"),
    "ranks equal": ({"prompt": "p", "responses": ["a", "b"], "scores": [1, 1]}, "scores: all answers have 1"),
    "one answer": ({"prompt": "p", "responses": ["a"], "rank": [1]}, "responses: .* expected a list of two"),
    "ranked same": ({"prompt": "p", "responses": ["a", "a"], "rank": [1, 2]}, r"responses\[1\]: the two answers"),
    "ranked null": ({"prompt": "p", "responses": ["a", None], "rank": [1, 2]}, r"responses\[1\]: found null"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PREFERENCES)
def test_faulty_preferences_are_named(tmp_path: Path, name: str) -> None:
    row, match = BAD_PREFERENCES[name]
    good = PREFERENCES["ranks" if "responses" in row else "strings"]
    with pytest.raises(RowsError, match=rf"rows\.jsonl:2: {match}") as caught:
        prepare_for(tmp_path, "dpo", [good, row], "dataset.format=preference")
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate"])
def test_preferences_that_are_too_long(tmp_path: Path, overlong: str) -> None:
    rows = [PREFERENCES["strings"], {"prompt": "q", "chosen": "a" * 150, "rejected": "b"}]
    override = f"dataset.overlong={overlong}", "training.max_length=120"
    if overlong == "error":
        with pytest.raises(RowsError, match=r"rows\.jsonl:2: rejected: prompt and answer have \d+ tokens.*max_length"):
            prepare_for(tmp_path, "dpo", rows, *override)
        return
    report = prepare_for(tmp_path, "dpo", rows, *override)["splits"]["train"]
    assert (report["rows"], report["dropped"], report["truncated"]) == ((1, 1, 0) if overlong == "drop" else (2, 0, 1))
    assert max(len(row["prompt_ids"]) + len(row["chosen_ids"]) for row in sequences(tmp_path / "work")) <= 120
    if overlong == "truncate":
        same = [{"prompt": "q", "chosen": "a" * 150, "rejected": "a" * 151}]
        with pytest.raises(RowsError, match="the same first"):
            prepare_for(tmp_path, "dpo", same, *override)


# --- prompts -------------------------------------------------------------------------------------

PROMPTS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": QUESTION, "answer": ANSWER},
    "messages": {"prompt": [USER], "solution": ANSWER},
    "prompt_completion": {"prompt": QUESTION, "completion": ANSWER},
    "chat": CHAT,
    "sharegpt": {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
    "alpaca": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "chat without answer": {"messages": [USER], "answer": ANSWER},
}


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.parametrize("name", PROMPTS)
def test_every_spelling_of_a_prompt(tmp_path: Path, name: str, method: str) -> None:
    row = PROMPTS[name] | {"difficulty": 3, "tags": ["x", {"y": None}]}
    prepared = prepare_for(tmp_path, method, [row, PROMPTS[name] | {"tags": "z"}], "dataset.test_size=1")
    assert prepared["kind"] == "prompt"
    assert prepared["max_completion_length"] == 8
    for split in ("train", "eval"):
        (found,) = sequences(tmp_path / "work", split)
        assert list(found) == ["prompt_ids", "prompt", "messages", "columns", "reference"]
        assert decoded(tmp_path / "work", found) == {"prompt_ids": ASKED}
        assert found["prompt"] == QUESTION
        as_text = name in ("prompt", "prompt_completion", "alpaca")
        assert json.loads(found["messages"]) == (QUESTION if as_text else [USER]), "rewards get it in the row's form"
        assert found["reference"] == ANSWER
        columns = json.loads(found["columns"])
        assert columns["tags"] in (["x", {"y": None}], "z")
        if name not in ("messages",):
            assert columns["answer"] == ANSWER
        assert prepared["splits"][split]["trained_tokens"] == 0
        assert prepared["splits"][split]["tokens"] == len(found["prompt_ids"])


def test_prompts_of_a_plain_model(tmp_path: Path) -> None:
    prepare_for(tmp_path, "grpo", [{"prompt": "1+1=", "answer": 2}], template=None, bos=True)
    (row,) = sequences(tmp_path / "work")
    assert decoded(tmp_path / "work", row) == {"prompt_ids": "<s>1+1="}
    assert json.loads(row["messages"]) == "1+1="
    assert (json.loads(row["columns"]), row["reference"]) == ({"answer": 2}, "2")


def test_prompts_keep_what_the_template_prints(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "system", "content": "Be brief."}, USER, BETTER_TURN, USER]}]
    prepare_for(tmp_path, "grpo", rows)
    (row,) = sequences(tmp_path / "work")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "model")
    wanted = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, return_dict=False)
    assert row["prompt_ids"] == wanted
    assert row["reference"] == ""
    assert json.loads(row["columns"]) == {}


def test_gsm8k_by_columns_and_the_hint_towards_it(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "It is #### 2", "id": 7}]
    with pytest.raises(DataError, match=r"dataset\.columns=\{prompt: question\}"):
        prepare_for(tmp_path, "grpo", rows)
    prepare_for(tmp_path, "grpo", rows, "dataset.columns={prompt: question}")
    (row,) = sequences(tmp_path / "work")
    assert json.loads(row["columns"]) == {"answer": "It is #### 2", "id": 7}
    assert row["reference"] == "It is #### 2"


def test_types_that_json_lacks_become_text(tmp_path: Path) -> None:
    from datetime import date

    table = pa.table({"prompt": ["p"], "day": [date(2026, 1, 2)], "score": [0.5]})
    pq.write_table(table, tmp_path / "rows.parquet")
    prepare_for(tmp_path, "grpo", tmp_path / "rows.parquet")
    assert json.loads(sequences(tmp_path / "work")[0]["columns"]) == {"day": "2026-01-02", "score": 0.5}


EXACT = "grpo.reward_funcs=[{name: exact_match}, {name: numeric_match, args: {column: gold}}]"


def test_the_answer_a_reward_needs_must_be_there(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "answer": "1", "gold": 1},
        {"prompt": "q", "answer": "", "gold": 0},
        {"prompt": "r", "solution": "3", "gold": None},
    ]
    with pytest.raises(RowsError) as caught:
        prepare_for(tmp_path, "grpo", rows, EXACT)
    found = [(fault.where.rpartition(":")[2], fault.key) for fault in caught.value.faults]
    assert found == [("2", "answer"), ("3", "answer"), ("3", "gold")]
    assert "exact_match" in str(caught.value)
    assert "dataset.columns={answer: solution}" in str(caught.value)
    prepare_for(tmp_path, "grpo", rows[:1], EXACT)
    prepare_for(tmp_path, "grpo", [CHAT], "grpo.reward_funcs=[{name: exact_match}]")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": ""}, r'prompt: "" is empty'),
        ({"prompt": 3}, "prompt: 3 is a number"),
        ({"prompt": []}, "prompt: the list is empty"),
        ({"prompt": [USER, BETTER_TURN]}, r"prompt\[1\].role: the last message is the assistant's"),
        ({"prompt": [USER, USER]}, r"prompt\[1\].role: 'user' after user"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, r"prompt\[0\].role: unknown role"),
        ({"promt": "x"}, "prompt: missing.*did you mean 'promt'"),
    ],
)
def test_faulty_prompts_are_named(tmp_path: Path, row: dict[str, Any], match: str) -> None:
    with pytest.raises(RowsError, match=rf"rows\.jsonl:2: {match}") as caught:
        prepare_for(tmp_path, "grpo", [PROMPTS["prompt"], row])
    assert len(caught.value.faults) == 1


def _with_context(tmp_path: Path, tokens: int) -> None:
    path = tiny_model(tmp_path / "work" / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": tokens}))


def test_prompt_and_answer_must_fit_the_models_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_context(tmp_path, 50)
    monkeypatch.setattr("initializers_kit.tiny_model", lambda *_, **__: None)
    rows = [{"prompt": "p" * 8}, {"prompt": "p" * 8 + "q"}]  # the template adds 35 tokens
    with pytest.raises(RowsError, match=r"rows\.jsonl:2: prompt: the prompt has \d+ tokens; .*model's context of 50"):
        prepare_for(tmp_path, "grpo", rows, f"grpo.max_completion_length={50 - len(_tokens(tmp_path, rows[0]))}")
    with pytest.raises(UsageError, match="answers of 60 tokens leave no room"):
        prepare_for(tmp_path, "grpo", rows, "grpo.max_completion_length=60")


def _tokens(tmp_path: Path, row: dict[str, Any]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "model")
    messages = [{"role": "user", "content": row["prompt"]}]
    found: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return found


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate"])
def test_prompts_that_are_too_long(tmp_path: Path, overlong: str) -> None:
    rows = [{"prompt": "p"}, {"prompt": "q" * 100}]
    override = f"dataset.overlong={overlong}", "training.max_length=60"
    if overlong == "error":
        with pytest.raises(RowsError, match=r"rows\.jsonl:2: prompt: the prompt has \d+ tokens.*training\.max_length"):
            prepare_for(tmp_path, "grpo", rows, *override)
        pairs = [row | {"completion": "c"} for row in rows]
        with pytest.raises(RowsError, match=r"rows\.jsonl:2: prompt: the prompt has"):
            prepare_for(tmp_path, "grpo", pairs, *override)
        return
    report = prepare_for(tmp_path, "grpo", rows, *override)["splits"]["train"]
    found = sequences(tmp_path / "work")
    assert (len(found), report["dropped"], report["truncated"]) == ((1, 1, 0) if overlong == "drop" else (2, 0, 1))
    if overlong == "truncate":  # the end, where the model is asked, stays
        assert found[1]["prompt_ids"] == _tokens(tmp_path, rows[1])[-60:]


# --- distillation and QAT ------------------------------------------------------------------------


def test_distillation_notes_where_the_last_answer_begins(tmp_path: Path) -> None:
    chat = [USER, WORSE_TURN, USER, BETTER_TURN]
    prepared = prepare_for(tmp_path, "distill", [{"messages": chat}] * 2, "dataset.test_size=1")
    assert (prepared["kind"], prepared["packing"], prepared["max_completion_length"]) == ("supervised", False, 128)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "model")
    for split in ("train", "eval"):
        (row,) = sequences(tmp_path / "work", split)
        ids, length = row["input_ids"], row["prompt_length"]
        assert ids[:length] == tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        assert tokenizer.decode(ids[length:]) == f"{ANSWER}<|im_end|>\n"


def test_a_student_may_learn_from_prompts_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no answers.*lmbda=0\.5(?s:.)*distill\.lmbda=1"):
        prepare_for(tmp_path, "distill", [{"prompt": QUESTION}])
    with pytest.raises(BlueprintError, match=r"dataset\.format.*no answers"):
        prepare_for(tmp_path, "distill", [{"prompt": QUESTION}], "dataset.format=prompt")
    prepare_for(tmp_path, "distill-student", [{"prompt": QUESTION, "id": 1}])
    (row,) = sequences(tmp_path / "work")
    assert decoded(tmp_path / "work", row) == {"input_ids": ASKED}
    assert row["completion_mask"] == [0] * len(row["input_ids"])
    assert row["prompt_length"] == len(row["input_ids"])


def test_plain_text_has_nothing_to_ask(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"plain text has no prompts(?s:.)*distill\.lmbda=0"):
        prepare_for(tmp_path, "distill", [{"text": "Hello."}])
    prepare_for(tmp_path, "distill-data", [{"text": "Hello."}])
    assert sequences(tmp_path / "work")[0]["prompt_length"] == 0


def test_qat_takes_the_options_of_sft(tmp_path: Path) -> None:
    options = "qat.packing=true", "qat.completion_only_loss=false"
    prepared = prepare_for(tmp_path, "qat", [CHAT, CHAT | {"n": 1}], *options)
    assert (prepared["packing"], prepared["completion_only_loss"]) == (True, False)
    (row,) = sequences(tmp_path / "work")
    assert len(row["seq_lengths"]) == 2


# --- tables --------------------------------------------------------------------------------------


def test_every_method_has_formats_and_a_kind() -> None:
    assert set(FORMATS) == set(KINDS) == set(ALL_METHODS) == {name.split("-")[0] for name in METHODS}
    assert set(CUSTOM_FORMATS) == set(formats.FORMATS)
    assert {name for usable in FORMATS.values() for name in usable} == set(formats.FORMATS)
    for name in CUSTOM_FORMATS:
        kind = {"preference": "preference", "prompt": "prompt"}.get(name, "supervised")
        assert kind_of("package.module:train", name) == kind


def test_a_method_of_ones_own_takes_the_most_specific_format() -> None:
    for row, name in ((PREFERENCES["strings"], "preference"), (PROMPTS["prompt"], "prompt"), (CHAT, "messages")):
        assert formats.detect([row], "package.module:train", "auto", {})[0].name == name
    assert formats.detect([PROMPTS["prompt_completion"]], "grpo", "auto", {})[0].name == "prompt_completion"
    with pytest.raises(UsageError, match=r"several formats: messages.*; prompt "):
        formats.detect([CHAT | {"prompt": "p"}], "grpo", "auto", {})


# --- rows that occur twice -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_repeated_and_leaked_rows_are_counted(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    make = {
        "sft": lambda n: {"prompt": f"p{n}", "completion": "c", "id": n},
        "dpo": lambda n: {"prompt": f"p{n}", "chosen": "c", "rejected": "r"},
        "grpo": lambda n: {"prompt": f"p{n}", "answer": "c"},
    }[method]
    rows = tmp_path / "rows"
    write_jsonl(rows / "train.jsonl", [make(n) for n in (1, 2, 3, 1, 1, 3)])
    write_jsonl(rows / "test.jsonl", [make(n) for n in (3, 4, 4, 1)])
    splits = prepare_for(tmp_path, method, rows)["splits"]
    assert (splits["train"]["duplicates"], splits["eval"]["duplicates"], splits["eval"]["leaked"]) == (3, 1, 2)
    assert "leaked" not in splits["train"]
    out = capsys.readouterr().out
    assert "warning: train: 3 rows repeat another row exactly" in out
    assert "warning: eval: 2 rows are in the training split too" in out


def test_counting_repeats_works_in_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from initializers import duplicates
    from initializers.messages import Text

    monkeypatch.setattr(duplicates, "PASS_HASHES", 7)
    monkeypatch.setattr(duplicates, "IN_MEMORY", 64)
    with duplicates.Duplicates(tmp_path) as seen:
        seen.add("train", [Text(str(n % 80)) for n in range(100)])
        seen.add("eval", [Text(str(n)) for n in range(70, 90)])
        assert (seen.repeated("train"), seen.repeated("eval"), seen.shared("eval", "train")) == (20, 0, 10)
        assert (seen.repeated("none"), seen.shared("none", "train"), seen.shared("eval", "none")) == (0, 0, 0)


# --- opening them in a trainer -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dpo", "grpo", "distill-student", "qat"])
def test_the_trainers_open_what_was_prepared(tmp_path: Path, method: str) -> None:
    pytest.importorskip("torch")
    from blueprints.recipe import load_recipe
    from trainers.data import open_prepared

    row = {"dpo": PREFERENCES["strings"], "qat": CHAT}.get(method, PROMPTS["prompt"])
    prepare_for(tmp_path, method, [row])
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), environ={}).recipe
    data = open_prepared(tmp_path / "work" / "dataset", recipe, 1000)
    assert data.kind == KINDS[method.split("-")[0]]
    assert len(data.train) == 1
    with pytest.raises(DataError, match="beyond the model's vocabulary of 50"):
        open_prepared(tmp_path / "work" / "dataset", recipe, 50)
    other = load_recipe(str(tmp_path / "recipe.yaml"), overrides=["training.max_length=77"], environ={}).recipe
    with pytest.raises(DataError, match="max_length=1024, the recipe says 77"):
        open_prepared(tmp_path / "work" / "dataset", other, 1000)
    (shard,) = (tmp_path / "work" / "dataset" / "prepared" / "train").glob("*.arrow")
    changed = bytearray(shard.read_bytes())
    changed[-30] ^= 1
    shard.write_bytes(changed)
    with pytest.raises(DataError, match="changed since it was written"):
        open_prepared(tmp_path / "work" / "dataset", recipe, 1000)
