"""Bad rows: each is found, with file, line, field, value and what was expected; nothing is prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from initializers_kit import CHAT, environment, prepare, recipe_file, run, step, texts, tiny_model, write_jsonl

from blueprints.errors import DataError, Fault, RowsError

GOOD = json.dumps(CHAT).encode()
USER = {"role": "user", "content": "q"}
BOT = {"role": "assistant", "content": "a"}


def messages(*items: Any) -> dict[str, Any]:
    return {"messages": list(items)}


ROWS: dict[str, tuple[Any, str, str]] = {
    "content of another type": (messages(USER, BOT | {"content": 5}), "messages[1].content", "5 is a number"),
    "content null": (messages(USER | {"content": None}, BOT), "messages[0].content", "null"),
    "no content": (messages({"role": "user"}, BOT), "messages[0].content", "missing; the message has role"),
    "empty answer": (messages(USER, BOT | {"content": " \n"}), "messages[1].content", "is empty"),
    "empty question": (messages(USER | {"content": ""}, BOT), "messages[0].content", "is empty"),
    "unknown role": (messages(USER | {"role": "usr"}, BOT), "messages[0].role", "unknown role"),
    "no role": (messages({"content": "q"}, BOT), "messages[0].role", "missing"),
    "two questions": (messages(USER, USER, BOT), "messages[1].role", "after user"),
    "two answers": (messages(USER, BOT, BOT), "messages[2].role", "after assistant"),
    "answer first": (messages(BOT, USER, BOT), "messages[0].role", "at the start"),
    "system in the middle": (
        messages(USER, BOT, {"role": "system", "content": "s"}, USER, BOT), "messages[2].role", "after others",
    ),
    "no answer": (messages(USER), "messages[0].role", "the last message is the user's"),
    "a tool without a call": (messages(USER, {"role": "tool", "content": "x"}, BOT), "messages[1].role", "after user"),
    "message of another type": (messages("hello", BOT), "messages[0]", "a string"),
    "empty list": (messages(), "messages", "empty"),
    "not a list": ({"messages": "hello"}, "messages", "is a string"),
    "null list": ({"messages": None}, "messages", "null"),
    "missing column": ({"other": 1}, "messages", "missing; the row has other"),
    "not an object": ([1, 2], "", "is a list"),
    "image": (messages(USER | {"content": [{"type": "image_url"}]}, BOT), "messages[0].content[0]", "no text"),
    "half a character": (messages(USER | {"content": "x\ud83d"}, BOT), "messages[0].content", "surrogate"),
    "weight": (messages(USER, BOT | {"weight": 3}), "messages[1].weight", "3"),
    "tool call": (messages(USER, BOT | {"tool_calls": [{}]}), "messages[1].tool_calls[0]", "names no function"),
}  # fmt: skip


def faults_of(tmp_path: Path, data: Path, more: str = "", **how: Any) -> tuple[Fault, ...]:
    with pytest.raises(RowsError) as caught:
        prepare(tmp_path, data, more, **how)
    assert not (tmp_path / "work" / "dataset").exists()
    return tuple(caught.value.faults)


@pytest.mark.parametrize("case", ROWS)
def test_a_bad_row_among_good_ones(tmp_path: Path, case: str) -> None:
    row, key, problem = ROWS[case]
    (fault,) = faults_of(tmp_path, write_jsonl_ascii(tmp_path / "rows.jsonl", [CHAT, CHAT, row, CHAT]))
    assert (fault.where, fault.key) == ("rows.jsonl:3", key)
    assert problem in fault.problem


def write_jsonl_ascii(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LINES: dict[str, tuple[bytes, str]] = {
    "broken JSON": (b'{"messages": [}', "not JSON"),
    "cut JSON": (GOOD[:-5], "not JSON"),
    "NaN": (b'{"messages": NaN}', "NaN is not JSON"),
    "infinity": (b'{"messages": -Infinity}', "-Infinity is not JSON"),
    "not UTF-8": (GOOD.replace(b"Paris", b"P\xe4ris"), "not UTF-8: byte 0xe4"),
    "key twice": (b'{"messages": 1, "messages": 2}', "twice"),
    "too deep": (b"[" * 100_000, "nested too deeply"),
    "two rows": (GOOD + b" " + GOOD, "not JSON: Extra data"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_among_good_ones(tmp_path: Path, case: str) -> None:
    line, problem = LINES[case]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([GOOD, b"", line, GOOD]))
    (fault,) = faults_of(tmp_path, tmp_path / "rows.jsonl")
    assert fault.where == "rows.jsonl:3"
    assert problem in fault.problem


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "empty prompt": ({"prompt": "p", "completion": "c"}, {"prompt": "", "completion": "c"}, "prompt", "is empty"),
    "null completion": ({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": None}, "completion", "null"),
    "no completion": ({"prompt": "p", "completion": "c"}, {"prompt": "p", "complete": "x"}, "completion", "missing"),
    "empty output": ({"instruction": "i", "output": "o"}, {"instruction": "i", "output": ""}, "output", "is empty"),
    "input number": (
        {"instruction": "i", "output": "o"}, {"instruction": "i", "output": "o", "input": 3}, "input", "a number",
    ),
    "empty text": ({"text": "t"}, {"text": "  "}, "text", "is empty"),
    "unknown speaker": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "humn", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "conversations[0].from", "unknown role",
    ),
    "completion without an answer": (
        {"prompt": [USER], "completion": [BOT]}, {"prompt": [USER], "completion": [USER]}, "completion[0].role", "user",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_the_other_formats(tmp_path: Path, case: str) -> None:
    good, bad, key, problem = OTHERS[case]
    (fault, *_) = faults_of(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [good, bad, good]))
    assert (fault.where, fault.key) == ("rows.jsonl:2", key)
    assert problem in fault.problem


def test_all_faults_up_to_the_limit(tmp_path: Path) -> None:
    tiny_model(tmp_path / "work" / "model")
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT if n % 2 else messages(USER) for n in range(300)])
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path))
    done = run("dataset", env | {"BLUEPRINTS_OVERRIDES": '["dataset.max_faults=10"]'})
    assert done.returncode == 3
    assert done.stderr.count("rows.jsonl:") == 10
    assert "140 more faults" in done.stderr
    assert "Traceback" not in done.stderr
    listed = json.loads((tmp_path / "work" / "dataset.faults.json").read_text())
    assert (listed["total"], listed["rows_checked"], len(listed["faults"])) == (150, 300, 10)
    first = {"where": "rows.jsonl:1", "key": "messages[0].role", "expected": "the assistant's"}
    assert first.items() <= listed["faults"][0].items()
    assert not (tmp_path / "work" / "dataset").exists()
    write_jsonl(tmp_path / "rows.jsonl", [CHAT])
    assert run("dataset", env).returncode == 0
    assert not (tmp_path / "work" / "dataset.faults.json").exists()


def test_rows_of_columns_are_numbered(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b", None], "completion": ["c", "", "d"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    found = faults_of(tmp_path, tmp_path / "rows.parquet")
    assert [(fault.where, fault.key) for fault in found] == [
        ("rows.parquet row 2", "completion"),
        ("rows.parquet row 3", "prompt"),
    ]


def test_lines_of_json_and_csv(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": 1}]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    assert faults_of(tmp_path, tmp_path / "rows.json")[0].where == "rows.json:6"
    (tmp_path / "line.json").write_text(json.dumps([*rows, rows[1]]) + "\n")
    assert [fault.where for fault in faults_of(tmp_path, tmp_path / "line.json")] == [
        "line.json:1 row 2",
        "line.json:1 row 3",
    ]
    (tmp_path / "broken.json").write_text('[{"prompt": "a", "completion": "b"},\n{"prompt": }]')
    assert faults_of(tmp_path, tmp_path / "broken.json")[0].where == "broken.json:2"
    (tmp_path / "cut.json").write_text('[{"prompt": "a", "completion": "b"},\n')
    assert "not JSON" in faults_of(tmp_path, tmp_path / "cut.json")[0].problem
    (tmp_path / "rows.csv").write_text('prompt,completion\n"two\nlines",x\na\na,\n')
    found = faults_of(tmp_path, tmp_path / "rows.csv")
    assert [(fault.where, fault.problem) for fault in found] == [
        ("rows.csv:4", "1 fields"),
        ("rows.csv:5", '"" is empty'),
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_data_set_is_a_fault(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert "there are no rows" in faults_of(tmp_path, tmp_path / "rows.jsonl")[0].problem


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"rows": []}', b"3"])
def test_json_without_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises((RowsError, DataError)):
        prepare(tmp_path, tmp_path / "rows.json")


@pytest.mark.parametrize(
    "columns", [{"prompt": ["a"], "completion": ["b"]}, {"prompt": {"0": "a"}, "completion": {"0": "b"}}]
)
def test_json_of_columns_says_what_rows_look_like(tmp_path: Path, columns: Any) -> None:
    for text in (json.dumps(columns), json.dumps(columns, indent=1)):
        (tmp_path / "rows.json").write_text(text)
        (fault,) = faults_of(tmp_path, tmp_path / "rows.json")
        assert "a list of rows" in fault.expected
        assert "to_json" in fault.hint


@pytest.mark.parametrize("content", [b"prompt,completion\ra,b\rc,d\r", b'prompt,"completion\na,b\n'])
def test_a_header_that_is_no_csv(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    (fault,) = faults_of(tmp_path, tmp_path / "rows.csv")
    assert (fault.where, fault.problem.startswith("not CSV: ")) == ("rows.csv:1", True)


def test_a_line_beyond_the_limit_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("initializers.containers.LINE_LIMIT", 1 << 20)
    (tmp_path / "rows.jsonl").write_bytes(GOOD + b'\n{"x": "' + b"x" * (2 << 20) + b'"}\n' + GOOD)
    (fault,) = faults_of(tmp_path, tmp_path / "rows.jsonl")
    assert fault.where == "rows.jsonl:2"
    assert "longer than 1 MiB" in fault.problem


def test_utf16_says_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(CHAT) + "\n", encoding="utf-16")
    (fault,) = faults_of(tmp_path, tmp_path / "rows.jsonl")
    assert "UTF-16" in fault.problem
    assert "iconv" in fault.hint


def test_the_value_is_shown_short(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT, messages(USER, BOT | {"content": ["x" * 500]})])
    (fault,) = faults_of(tmp_path, rows)
    assert len(fault.problem) < 120


LONG = messages(USER, BOT | {"content": "a" * 200})


def test_an_overlong_answer_stops_drops_or_is_cut(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT, LONG])
    (fault,) = faults_of(tmp_path, rows, "training: {max_length: 100}")
    assert fault.where == "rows.jsonl:2"
    assert "tokens" in fault.problem
    assert "dataset.overlong" in fault.hint
    for rule, counted in (("drop", "dropped"), ("truncate", "truncated")):
        path = recipe_file(tmp_path, "training: {max_length: 100}")
        env = environment(tmp_path / "work", rows, recipe=path, BLUEPRINTS_OVERRIDES=f'["dataset.overlong={rule}"]')
        step("dataset", env)
        report = json.loads((tmp_path / "work/dataset/_manifest.json").read_text())["prepared"]["splits"]["train"]
        assert report[counted] == 1
        assert report["sequences"] == (1 if rule == "drop" else 2)
        assert report["rows"] == report["sequences"]
        assert report["longest"] > 200


def test_no_trained_token_is_a_fault_even_when_cutting(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT, messages(USER | {"content": "q" * 200}, BOT)])
    tiny_model(tmp_path / "work" / "model")
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path, "training: {max_length: 100}"))
    with pytest.raises(RowsError, match="no token of the row would be trained"):
        step("dataset", env | {"BLUEPRINTS_OVERRIDES": '["dataset.overlong=truncate"]'})
    with pytest.raises(RowsError, match="no token of the row would be trained"):
        step("dataset", environment(tmp_path / "work", unweighted(tmp_path), recipe=recipe_file(tmp_path)))


def unweighted(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "unweighted.jsonl", [messages(USER, BOT | {"weight": 0})])


def test_text_is_cut_and_counted(tmp_path: Path) -> None:
    prepared = prepare(
        tmp_path, write_jsonl(tmp_path / "rows.jsonl", [{"text": "x" * 50_000}]), "training: {max_length: 64}"
    )
    assert prepared["splits"]["train"]["truncated"] == 1
    assert texts(tmp_path / "work") == [("x" * 64, "x" * 63)]


def test_every_row_dropped_is_an_error(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [LONG])
    tiny_model(tmp_path / "work" / "model")
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path, "training: {max_length: 100}"))
    with pytest.raises(DataError, match="were dropped"):
        step("dataset", env | {"BLUEPRINTS_OVERRIDES": '["dataset.overlong=drop"]'})


def test_validate_leaves_nothing_behind(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "src" / "rows.jsonl", [CHAT] * 5)
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path))
    done = run("validate", env | {"TMPDIR": str(tmp_path / "src")})
    assert done.returncode == 0, done.stderr
    assert "5 rows (train 5), format messages" in done.stdout
    assert not (tmp_path / "work").exists()
    assert [path.name for path in (tmp_path / "src").iterdir()] == ["rows.jsonl"]
    tiny_model(tmp_path / "work" / "model")
    assert "longest row 57 tokens" in run("validate", env).stdout
    write_jsonl(rows, [CHAT, messages(USER)])
    done = run("validate", env)
    assert done.returncode == 3
    assert "rows.jsonl:2: messages[0].role" in done.stderr
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["model"]
