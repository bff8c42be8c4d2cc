"""Every format in every container becomes the same training sequence; what is ambiguous or unknown is refused."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from initializers_kit import (
    ANSWER,
    CHAT,
    QUESTION,
    environment,
    manifest,
    prepare,
    recipe_file,
    sequences,
    step,
    texts,
    write_jsonl,
)

from blueprints.errors import BlueprintError, DataError, ExitCode, RowsError, UsageError
from initializers import formats

RENDERED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
TRAINED = f"{ANSWER}<|im_end|>"
ROWS: dict[str, dict[str, Any]] = {
    "messages": CHAT,
    "sharegpt": {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
    "prompt_completion": {"prompt": QUESTION, "completion": ANSWER},
    "alpaca": {"instruction": QUESTION, "input": "", "output": ANSWER},
}


def _csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    cells = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows]
    writer.writerows(cells)
    return text.getvalue().encode()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def _arrow(rows: list[dict[str, Any]], *, stream: bool) -> bytes:
    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _feather(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


CONTAINERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": _lines,
    "ndjson": lambda rows: b"\xef\xbb\xbf" + _lines(rows).replace(b"\n", b"\r\n") + b"\n\n",
    "json": lambda rows: json.dumps(rows, indent=2).encode(),
    "data.json": lambda rows: json.dumps({"version": "1", "meta": {"data": [0]}, "data": rows}).encode(),
    "lines.json": _lines,
    "list.jsonl": lambda rows: json.dumps(rows).encode(),
    "csv": _csv,
    "semicolon.csv": lambda rows: _csv(rows, ";"),
    "tsv": lambda rows: _csv(rows, "\t"),
    "parquet": _parquet,
    "arrow": lambda rows: _arrow(rows, stream=False),
    "stream.arrow": lambda rows: _arrow(rows, stream=True),
    "feather": _feather,
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ROWS)
def test_every_format_in_every_container(tmp_path: Path, name: str, container: str) -> None:
    rows = [ROWS[name]] * 3
    (tmp_path / f"rows.{container}").write_bytes(CONTAINERS[container](rows))
    prepared = prepare(tmp_path, tmp_path / f"rows.{container}")
    assert prepared["format"] == name
    assert texts(tmp_path / "work") == [(RENDERED, TRAINED)] * 3


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("container", ["jsonl", "json", "csv", "parquet", "arrow", "stream.arrow"])
def test_every_compression(tmp_path: Path, container: str, compression: str) -> None:
    path = tmp_path / f"rows.{container}{compression}"
    path.write_bytes(COMPRESSIONS[compression](CONTAINERS[container]([CHAT, CHAT])))
    prepare(tmp_path, path)
    assert texts(tmp_path / "work") == [(RENDERED, TRAINED)] * 2


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows", "rows.txt"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_content_goes_before_the_name(tmp_path: Path, name: str, compression: str) -> None:
    (tmp_path / name).write_bytes(COMPRESSIONS[compression](_lines([CHAT])))
    prepare(tmp_path, tmp_path / name)
    assert texts(tmp_path / "work") == [(RENDERED, TRAINED)]


def test_plain_text_is_trained_whole_and_ends(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [{"text": "Hello"}]), bos=True)
    assert prepared["format"] == "text"
    assert texts(tmp_path / "work") == [("<s>Hello<|im_end|>", "Hello<|im_end|>")]


def test_pairs_and_instructions_work_without_a_template(tmp_path: Path) -> None:
    prepare(tmp_path, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}]), template=None)
    assert texts(tmp_path / "work") == [("1+1=2<|im_end|>", "2<|im_end|>")]
    alpaca = {"instruction": "Add", "input": "1 1", "output": "2"}
    prepare(tmp_path, write_jsonl(tmp_path / "b.jsonl", [alpaca]), template=None, bos=True)
    ((text, trained),) = texts(tmp_path / "work")
    assert text.startswith("<s>Below is an instruction")
    assert "### Input:\n1 1\n\n### Response:\n2" in text
    assert trained == "2<|im_end|>"


def test_conversations_need_a_template(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT])
    with pytest.raises(DataError, match=r"model\.chat_template"):
        prepare(tmp_path, rows, template=None)
    turns = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}assistant:{% endif %}"
    recipe = f'model: {{uri: "file:///model", chat_template: "{template}"}}'
    path = recipe_file(tmp_path)
    path.write_text(path.read_text().replace('model: {uri: "file:///model"}', recipe))
    step("dataset", environment(tmp_path / "work", rows, recipe=path))
    assert texts(tmp_path / "work") == [(f"user:{QUESTION}<|im_end|>assistant:{ANSWER}<|im_end|>", TRAINED)]


def test_columns_map_other_names(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"question": QUESTION, "answer": ANSWER, "text": "other"}])
    columns = 'dataset: {uri: "file:///rows", columns: {prompt: question, completion: answer}}'
    path = recipe_file(tmp_path)
    path.write_text(path.read_text().replace('dataset: {uri: "file:///rows"}', columns))
    from initializers_kit import tiny_model

    tiny_model(tmp_path / "work" / "model")
    step("dataset", environment(tmp_path / "work", rows, recipe=path))
    assert texts(tmp_path / "work") == [(RENDERED, TRAINED)]


def _prepare_with(tmp_path: Path, rows: Path, *overrides: str) -> Path:
    from initializers_kit import tiny_model

    tiny_model(tmp_path / "work" / "model")
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path), BLUEPRINTS_OVERRIDES=json.dumps(overrides))
    step("dataset", env)
    return tmp_path / "work"


def test_ambiguity_names_the_candidates(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT | {"text": "x"}])
    with pytest.raises(UsageError, match=r"(?s)messages.*text.*dataset\.format=messages"):
        _prepare_with(tmp_path, rows)
    assert texts(_prepare_with(tmp_path, rows, "dataset.format=messages")) == [(RENDERED, TRAINED)]


@pytest.mark.parametrize(
    ("row", "overrides", "error", "match"),
    [
        ({"question": "a", "answer": "b"}, (), DataError, "question, answer.*dataset.columns"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, (), DataError, "preference.*sft does not take"),
        ({"prompt": "a"}, (), DataError, "look like prompt"),
        (CHAT, ("dataset.format=preference",), UsageError, "cannot be used by the method sft"),
        (CHAT, ("dataset.columns={prompt: question, completion: answer}",), UsageError, "no column 'question'"),
        (CHAT, ("dataset.columns={promt: question}",), BlueprintError, "did you mean|promt"),
        (["a"], (), DataError, "objects with named columns"),
    ],
)
def test_what_fits_no_format(tmp_path: Path, row: Any, overrides: tuple[str, ...], error: type, match: str) -> None:
    with pytest.raises(error, match=f"(?s){match}"):
        _prepare_with(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]), *overrides)


def test_the_reason_is_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _prepare_with(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [ROWS["alpaca"]]))
    assert "format: alpaca, because the rows have the columns instruction, output" in capsys.readouterr().out


SPLITS = {
    "train.jsonl test.jsonl": ("train.jsonl", "test.jsonl"),
    "data/train-00000-of-00002.jsonl data/train-00001-of-00002.jsonl data/test-00000-of-00001.jsonl": (
        "data/train-0",
        "data/test-0",
    ),
    "train/a.jsonl validation/a.jsonl test/a.jsonl": ("train/", "validation/"),
    "train.jsonl dev.jsonl eval.jsonl": ("train.", "dev."),
    "orders.jsonl more.jsonl": ("", ""),
    "my-train.jsonl my-valid.jsonl README.md LICENSE .gitattributes dataset_infos.json": ("my-train", "my-valid"),
    "training_set.jsonl testing_set.jsonl": ("training", "testing"),
}


@pytest.mark.parametrize("names", SPLITS)
def test_splits_are_known_by_names(tmp_path: Path, names: str) -> None:
    train, held_out = SPLITS[names]
    for name in names.split():
        write_jsonl(tmp_path / "src" / name, [{"prompt": "p", "completion": name}])
    work = _prepare_with(tmp_path, tmp_path / "src")
    trained = [answer.removesuffix("<|im_end|>") for _, answer in texts(work)]
    data = [name for name in names.split() if name.endswith(".jsonl")]
    assert trained == sorted(name for name in data if name.startswith(train))
    held = [answer.removesuffix("<|im_end|>") for _, answer in texts(work, "eval")]
    assert held == (sorted(name for name in data if name.startswith(held_out)) if held_out else [])


@pytest.mark.parametrize(
    ("split", "file", "other"),
    [("val", "val.jsonl", "validation"), ("validation", "dev.jsonl", "dev"), ("test", "test.jsonl", "testing")],
)
def test_what_is_trained_on_is_never_held_out_too(tmp_path: Path, split: str, file: str, other: str) -> None:
    write_jsonl(tmp_path / "src" / file, [CHAT])
    work = _prepare_with(tmp_path, tmp_path / "src", f"dataset.split={split}")
    assert set(manifest(work)["rows"]) == {"train"}
    with pytest.raises(UsageError, match=f"files in common: {file}"):
        _prepare_with(tmp_path, tmp_path / "src", f"dataset.split={split}", f"dataset.eval_split={other}")


def test_mixed_containers_make_one_split(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.parquet").write_bytes(_parquet([CHAT]))
    (tmp_path / "src" / "b.csv.gz").write_bytes(gzip.compress(_csv([CHAT])))
    (tmp_path / "src" / "c.json").write_bytes(json.dumps([CHAT]).encode())
    assert texts(_prepare_with(tmp_path, tmp_path / "src")) == [(RENDERED, TRAINED)] * 3


def test_a_missing_split_lists_those_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "src" / "test.jsonl", [CHAT])
    with pytest.raises(UsageError, match=r"no split 'train'; its splits: test"):
        _prepare_with(tmp_path, tmp_path / "src")
    _prepare_with(tmp_path, tmp_path / "src", "dataset.split=test")
    _prepare_with(tmp_path, tmp_path / "src" / "test.jsonl")  # named by the user: all of it is the training split


def test_nothing_readable_lists_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "photo.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"photo\.png"):
        _prepare_with(tmp_path, tmp_path / "src")


def test_the_readme_states_splits_and_subsets(tmp_path: Path) -> None:
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/first*}\n"
    card += "  - {split: test, path: main/second*}\n- config_name: other\n  data_files: other/*\n---\n# Title\n"
    for name in ("main/first.jsonl", "main/second.jsonl", "other/third.jsonl"):
        write_jsonl(tmp_path / "src" / name, [{"prompt": "p", "completion": name}])
    (tmp_path / "src" / "README.md").write_text(card)
    with pytest.raises(UsageError, match=r"several subsets: main, other"):
        _prepare_with(tmp_path, tmp_path / "src")
    work = _prepare_with(tmp_path, tmp_path / "src", "dataset.ignore_patterns=['other/*']")
    assert [answer for _, answer in texts(work)] == ["main/first.jsonl<|im_end|>"]
    assert [answer for _, answer in texts(work, "eval")] == ["main/second.jsonl<|im_end|>"]


@pytest.mark.parametrize(("size", "held"), [("0.1", 10), ("7", 7), ("0", 0), ("0.001", 1)])
def test_test_size_holds_out_an_exact_share(tmp_path: Path, size: str, held: int) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "completion": str(n)} for n in range(100)])
    work = _prepare_with(tmp_path, rows, f"dataset.test_size={size}")
    train, out = {answer for _, answer in texts(work)}, {answer for _, answer in texts(work, "eval")}
    assert len(out) == held
    assert len(train) == 100 - held
    assert not train & out
    assert ("eval" in manifest(work)["prepared"]["splits"]) == bool(held)
    if size == "0.1":
        _prepare_with(tmp_path, rows, "dataset.test_size=0.1", "training.data_seed=7")
        assert {answer for _, answer in texts(work, "eval")} != out


def test_max_rows_takes_the_first(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "completion": str(n)} for n in range(100)])
    work = _prepare_with(tmp_path, rows, "dataset.max_rows=3")
    assert [answer for _, answer in texts(work)] == ["0<|im_end|>", "1<|im_end|>", "2<|im_end|>"]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "rows.parquet").write_bytes(_parquet([CHAT])[:-20])
    with pytest.raises(DataError, match=r"rows\.parquet.*(?s:.)*fetch or write it again"):
        _prepare_with(tmp_path, tmp_path / "src")
    for suffix, compress in list(COMPRESSIONS.items())[1:]:
        path = tmp_path / f"cut.jsonl{suffix}"
        path.write_bytes(compress(_lines([CHAT | {"n": n} for n in range(2000)]))[:-20])
        with pytest.raises((DataError, RowsError)) as caught:
            _prepare_with(tmp_path, path)
        assert caught.value.exit_code == ExitCode.INVALID_DATA


def test_a_recipe_is_not_needed_to_fetch(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"any": "thing"}])
    assert step("dataset", environment(tmp_path / "work", rows)) == 0
    assert (tmp_path / "work" / "dataset" / "rows.jsonl").read_bytes() == rows.read_bytes()
    assert "prepared" not in manifest(tmp_path / "work")
    assert sequences(tmp_path / "work") == []


ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Blue."}


def test_a_text_column_that_repeats_the_row_is_no_second_format() -> None:
    rows = [ALPACA | {"text": "### Instruction:\nName a colour.\n\n### Response:\nBlue."}]
    chosen, reason = formats.detect(rows, "sft", "auto", {})
    assert chosen.name == "alpaca"
    assert "column text repeats" in reason


def test_a_text_column_of_its_own_is_ambiguous() -> None:
    rows = [ALPACA | {"text": "Something else."}]
    with pytest.raises(UsageError, match="several formats"):
        formats.detect(rows, "sft", "auto", {})
