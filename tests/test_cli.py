"""The command line: its verbs and flags, what it prints, and what it exits with."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from blueprints.cli import main
from blueprints.cli.arguments import EXIT_CODES, VERBS, parse, verb_parser
from blueprints.errors import ExitCode, UsageError
from blueprints.recipe.faults import all_keys
from blueprints.recipe.shipped import shipped_names

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [sys.executable, "-m", "blueprints"]
ENVIRON = {name: value for name, value in os.environ.items() if name != "LORA_CONFIG"} | {"PYTHONPATH": str(ROOT)}

PLACE = {"--backend", "--context", "--namespace", "--kubeconfig"}
FLAGS = {
    "train": {"--name", "--detach", "--dry-run", "--json", "-f", "--file", *PLACE},
    "render": {"-f", "--file", "--name", "-o", "--jobset", "--output"},
    "jobs": {"--json", *PLACE},
    "get": {"--json", *PLACE},
    "logs": {"--step", "--follow", *PLACE},
    "events": {"--json", *PLACE},
    "suspend": {*PLACE},
    "resume": {*PLACE},
    "wait": {"--timeout", "--json", *PLACE},
    "delete": {"--force", "--claims", *PLACE},
    "recipes": {"--json"},
    "show": {"-f", "--file", "--json"},
    "explain": {"-f", "--file", "--json"},
    "validate": {"-f", "--file", "--data", "--json"},
    "schema": set(),
    "migrate": {"-o", "--output", "--cluster"},
    "eval": {
        "--dataset",
        "--split",
        "--metric",
        "--max-rows",
        "--max-new-tokens",
        "--harness",
        "--tasks",
        "--include-path",
        "--json",
    },
    "runtimes": {
        "--overlay",
        "--generic",
        "-o",
        "--output",
        "--kubeconfig",
        "--context",
        "--dry-run",
        "--json",
    },
}


@pytest.fixture(autouse=True)
def _no_lora_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORA_CONFIG", raising=False)


def blueprints(*args: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args], cwd=cwd, env=ENVIRON | environ, text=True, capture_output=True, check=False, timeout=120
    )


# Verbs, flags, help --------------------------------------------------------------------------------------------------


def test_the_verbs_and_their_flags_are_these() -> None:
    flags = {
        name: {option for action in verb_parser(verb)._actions for option in action.option_strings} - {"-h", "--help"}
        for name, verb in VERBS.items()
    }
    assert flags == FLAGS


def test_help_teaches() -> None:
    shown = blueprints("--help")
    assert shown.returncode == 0
    assert shown.stderr == ""
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.help)}$", shown.stdout, re.MULTILINE)
    for code, meaning in EXIT_CODES:
        assert re.search(rf"^  {code} +{re.escape(meaning)}$", shown.stdout, re.MULTILINE)
    assert "blueprints train quickstart" in shown.stdout
    assert blueprints("help").stdout == shown.stdout


@pytest.mark.parametrize("verb", FLAGS)
def test_every_verb_has_help_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: blueprints {verb}")
    assert f"Examples:\n  blueprints {verb}" in shown
    assert max(len(line) for line in shown.splitlines()) <= 120
    for flag in FLAGS[verb]:
        assert flag in shown


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, blueprints.cli; blueprints.cli.main(['--help']); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    loaded = set(shown.splitlines()[-1].split())
    assert loaded.isdisjoint({"pydantic", "yaml", "rich", "torch", "transformers", "kubernetes"})


def test_exit_codes_are_documented_once() -> None:
    assert {code for code, _ in EXIT_CODES} == {int(code) for code in ExitCode} - {int(ExitCode.TERMINATED)}


def test_version() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert blueprints("--version").stdout == f"blueprints {version[1]}\n"


def test_without_a_verb_the_help_is_shown_as_a_fault() -> None:
    shown = blueprints()
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "usage: blueprints VERB" in shown.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "unknown verb 'trian'\n  -> did you mean `blueprints train`?"),
        (["xyzzy"], "verbs: train, render, jobs"),
        (["--jsn"], "unknown option --jsn"),
        (["show", "sft", "--jsno"], "did you mean --json?"),
        (["show"], "RECIPE is missing"),
        (["explain"], "KEY is missing"),
        (["show", "sft", "lora.r"], "one argument too many: 'lora.r'\n  -> a value is set as key=value: lora.r=..."),
        (
            ["show", "sft", "more.yaml"],
            "one argument too many: 'more.yaml'\n  -> a file is laid over the recipe with -f",
        ),
        (["show", "sft", "lora.r: 4"], "a value is set as key=value: lora.r=4"),
        (["get"], "the following arguments are required: NAME"),
        (["wait", "x", "--timeout", "soon"], "invalid number of seconds value: 'soon'"),
        (["train", "sft", "--backend", "mars"], "invalid choice: 'mars'"),
    ],
)
def test_wrong_arguments(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["sft", "lora.r=4", "-f", "a.yaml", "--name", "x", "training.seed=1"],
        ["--name", "x", "lora.r=4", "sft", "training.seed=1", "--file=a.yaml"],
        ["-f", "a.yaml", "lora.r=4", "training.seed=1", "--name=x", "sft"],
        ["lora.r=4", "--name", "x", "sft", "training.seed=1", "-fa.yaml"],
    ],
)
def test_operands_and_options_mix_in_any_order(words: list[str]) -> None:
    args = parse(VERBS["train"], words)
    assert (args.recipe, args.overrides, args.files, args.name) == (
        "sft",
        ["lora.r=4", "training.seed=1"],
        ["a.yaml"],
        "x",
    )


def test_a_recipe_file_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "lr=1.yaml"
    path.touch()
    assert parse(VERBS["show"], [str(path), "lora.r=2"]).recipe == str(path)
    with pytest.raises(UsageError, match="RECIPE is missing"):
        parse(VERBS["show"], ["lora.r=2"])


# The recipe verbs ----------------------------------------------------------------------------------------------------


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "METHOD", "MODEL", "DATASET"]
    assert lines[1].split() == ["quickstart", "sft", "builtin://tiny-llama", "builtin://orders"]
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == shipped_names()
    assert set(rows[0]) == {"name", "method", "model", "dataset", "description"}


def test_show_is_a_recipe_with_the_origin_of_each_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("training:\n  max_steps: 5\n", encoding="utf-8")
    assert main(["show", "sft-lora", "-f", str(overlay), "lora.r=4", "runtime.env.A=b # c"]) == 0
    shown = capsys.readouterr().out
    for pattern in (
        r"^method: sft +# recipe sft-lora.yaml:3$",
        r"^  r: 4 +# override 'lora.r=4'$",
        rf"^  max_steps: 5 +# overlay {re.escape(str(overlay))}:2$",
        r"^  lora_alpha: 32 +# recipe sft-lora.yaml:\d+$|^  lora_alpha: 8 +# derived$",
        r"^  weight_decay: 0.0 +# default$",
        r"^  # num_train_epochs: 1.0 +# idle: `training.max_steps` decides",
        r"^    A: \"b # c\" +# override 'runtime.env.A=b # c'$",
        r"^# hash [0-9a-f]{64}\n\Z",
    ):
        assert re.search(pattern, shown, re.MULTILINE), pattern
    # What is shown is itself a recipe, with the same hash.
    copy = tmp_path / "copy.yaml"
    copy.write_text(shown, encoding="utf-8")
    assert main(["show", str(copy)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == shown.splitlines()[-1]


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for key in all_keys():
        for args in ([key], ["sft-lora", key], ["--json", key]):
            assert main(["explain", *args]) == 0, args
            assert key in capsys.readouterr().out


def test_any_yaml_reader_reads_what_show_prints(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["no", "1:20", "2026-11-21", "<<", "=", "~", "0x1G", "1_000", "on"]
    for text in texts:
        assert main(["show", "sft-lora", f"dataset.split={json.dumps(text)}", "training.weight_decay=1e22"]) == 0
        data = yaml.safe_load(capsys.readouterr().out)
        assert data["dataset"]["split"] == text
        assert (data["training"]["weight_decay"], data["training"]["adam_epsilon"]) == (1e22, 1e-8)


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "sft", "--json", "lora.r=4"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"recipe", "origins", "hash"}
    assert data["recipe"]["lora"]["r"] == 4
    assert data["origins"]["lora.r"] == {"layer": "override", "where": "override 'lora.r=4'"}
    assert re.fullmatch("[0-9a-f]{64}", data["hash"])


def test_the_environment_is_a_layer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_CONFIG", '{"r": 3}')
    assert main(["explain", "sft", "lora.r", "lora.r=4"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"value: +3$", shown, re.MULTILINE)
    assert re.search(r"set by: +environment LORA_CONFIG$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["lora.r"], ["lora.r", "Rank of the update.", "an integer, at least 1", "default: 16"]),
        (["training.lr_scheduler_type"], ["one of linear, cosine", "default: cosine"]),
        (["training.learning_rate"], ["a number, greater than 0", "sft 2e-4 with LoRA"]),
        (["lora"], ["Low-rank adapters (PEFT)", "keys:", "use_dora", "quantize_base"]),
        (["sft"], ["Supervised fine-tuning", "packing"]),
        (["grpo.reward_funcs.name"], ["exact_match", "required"]),
        (["grpo.reward_funcs[0].name"], ["exact_match", "required"]),
        (["runtime.env.A", "runtime.env.A=x"], ["value:   x", "override 'runtime.env.A=x'"]),
        (["sft-lora", "lora.r", "lora.r=9"], ["value:   9", "set by:  override 'lora.r=9'"]),
        (["lora.r=9", "sft-lora", "lora.lora_alpha"], ["default: 2 * r"]),
        (["sft-lora", "training.seed"], ["value:   42", "set by:  default"]),
        (["training.seed", "training.seed=3"], ["value:   3", "set by:  override 'training.seed=3'"]),
        (["sft", "resources"], ["gpu", "= 1  (recipe sft.yaml:"]),
        (["sft", "lora.r"], ["set by:  default, as the recipe has no `lora`"]),
        (["sft-lora", "lora.r", "lora.r=null"], ["value:   16", "default, unset by override 'lora.r=null'"]),
    ],
)
def test_explain(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *args]) == 0
    shown = capsys.readouterr().out
    for word in words:
        assert word in shown


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "sft-lora", "lora.r"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["key"], data["default"], data["value"], data["layer"]) == ("lora.r", "16", 16, "recipe")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("learning_rate", "`learning_rate` belongs under `training`."),
        ("lora.rr", "Did you mean `r`?"),
        ("lora.r.x", "`lora.r` has no keys"),
        ("loar", "Did you mean `lora`?"),
        ("sft-lora", "That is a recipe; name a key after it: `blueprints explain sft-lora lora.r`."),
        ("mine.yaml", "That is a recipe"),
        (".", "unknown key"),
    ],
)
def test_explain_unknown_keys(key: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", key]) == 2
    assert words in capsys.readouterr().err


def test_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "sft"]) == 0
    assert re.match(r"OK  sft: the recipe is valid \(method sft\)\n    hash [0-9a-f]{64}\n\Z", capsys.readouterr().out)
    broken = tmp_path / "broken.yaml"
    broken.write_text("method: sft\nmodle: x\n", encoding="utf-8")
    assert main(["validate", str(broken)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{broken}:2: modle: unknown key" in captured.err
    assert main(["validate", str(broken), "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["exit_code"], len(data["faults"])) == (False, 2, 3)
    assert main(["validate", "sft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_validate_data(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="checks data with the extra `initializers`")
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "a", "completion": "b"}\n' * 3, encoding="utf-8")
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 3, "completion": "b"}\n', encoding="utf-8")
    shown = blueprints("validate", "sft", "--data", f"dataset=file://{good}")
    assert shown.returncode == 0, shown.stderr
    assert "recipe and data are valid" in shown.stdout
    shown = blueprints("validate", "sft", "--data", f"dataset=file://{bad}")
    assert shown.returncode == 3
    assert "bad.jsonl:2" in shown.stderr
    shown = blueprints("validate", "sft", "--data", "--json", f"dataset=file://{bad}")
    assert shown.returncode == 3
    data = json.loads(shown.stdout)
    assert (data["ok"], data["exit_code"], data["code"]) == (False, 3, "INVALID_DATA")
    # Layers of the client's environment are in the recipe already, and wrong ones have been told.
    assert blueprints("validate", "sft", "--data", f"dataset=file://{good}", LORA_CONFIG='{"r": 3}').returncode == 0


def test_validate_data_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("blueprints.cli.recipe.NEEDED_FOR_DATA", ("pyarrow_that_is_not_there",))
    assert main(["validate", "sft", "--data"]) == 5
    captured = capsys.readouterr().err
    assert "pyarrow_that_is_not_there" in captured
    assert "pip install 'llm-blueprints[initializers]'" in captured


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "llm-blueprints recipe"


# Errors and outputs --------------------------------------------------------------------------------------------------


def test_errors_as_json_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "sft", "lora.rr=1", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    data = json.loads(captured.err)
    assert (data["code"], data["faults"][0]["key"]) == ("USER_INPUT", "lora.rr")


def test_our_bugs_are_one_line_and_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_args: object) -> int:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("blueprints.cli.recipe.schema", broken)
    assert main(["schema"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "this is a bug of llm-blueprints (ZeroDivisionError: first line); please report it with " in line
    saved = Path(line.rpartition(" ")[2])
    assert "in broken" in saved.read_text(encoding="utf-8")
    saved.unlink()


def test_interruption_and_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    def full(_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")

    monkeypatch.setattr("blueprints.cli.recipe.schema", interrupted)
    assert main(["schema"]) == 130
    monkeypatch.setattr("blueprints.cli.recipe.schema", full)
    assert main(["schema"]) == 5
    assert "/somewhere: No space left on device" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen([*PROGRAM, "schema"], env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def at_a_terminal(*args: str, **environ: str) -> str:
    """What a command prints when its standard output is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*PROGRAM, *args], env=ENVIRON | {"TERM": "xterm-256color"} | environ, stdout=theirs):
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux ends a terminal that way
                break
            if not chunk:
                break
            shown += chunk
    os.close(ours)
    return shown.decode()


def test_colours_are_for_terminals_only() -> None:
    assert "\x1b[" not in blueprints("recipes").stdout
    assert "\x1b[" in at_a_terminal("recipes")
    assert "\x1b[" not in at_a_terminal("recipes", NO_COLOR="1")


def test_a_terminal_without_unicode_shows_the_rest(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("method: sft\nmodel: hf://a/b\ndataset: hf://a/b\nrünt: 日本\n", encoding="utf-8")
    shown = blueprints("validate", "r.yaml", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert shown.returncode == 2
    assert "r.yaml:4" in shown.stderr
    assert "Traceback" not in shown.stderr
