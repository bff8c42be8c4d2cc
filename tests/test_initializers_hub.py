"""`hf://` against a local server with the Hub's protocol: what is fetched, what is recorded, how it fails."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repo, hub_server
from initializers_kit import CHAT, environment, manifest, recipe_file, run, spawn, step, texts, tiny_model, write_jsonl

from blueprints.errors import BlueprintError, DataError, EnvironmentFault, UsageError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    with hub_server() as server:
        yield server


def model_repo(hub: Hub, tmp_path: Path, name: str = "org/tiny", **how: object) -> Path:
    root = tiny_model(tmp_path / "hub" / name)
    hub.add(name, Repo(root, **how))  # type: ignore[arg-type]  # keywords of the test
    return root


def env_of(hub: Hub, tmp_path: Path, uri: str, **more: str) -> dict[str, str]:
    return environment(tmp_path / "work", uri, HF_ENDPOINT=hub.endpoint, **more)


def test_a_model_arrives_with_its_commit(hub: Hub, tmp_path: Path) -> None:
    root = model_repo(hub, tmp_path)
    for name in ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "consolidated.safetensors", "code.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x" * 9)
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "rag.jinja").write_text("x")
    assert step("model", env_of(hub, tmp_path, "hf://org/tiny")) == 0
    found = manifest(tmp_path / "work", "model")
    assert found["revision"] == Repo(root).resolve("main")[0]  # type: ignore[index]
    assert [item["path"] for item in found["files"]] == [
        "additional_chat_templates/rag.jinja", "chat_template.jinja", "config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert not (tmp_path / "work" / "model" / ".cache").exists()
    asked = len(hub.requests)
    assert step("model", env_of(hub, tmp_path, "hf://org/tiny")) == 0
    assert len(hub.requests) == asked  # complete: no network


def test_a_revision_beside_or_in_the_uri(hub: Hub, tmp_path: Path) -> None:
    root = model_repo(hub, tmp_path)
    other = tiny_model(tmp_path / "hub" / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "llama", "note": "v2", "vocab_size": 260}))
    hub.add("org/tiny", Repo(root, commits={"v2": other}))
    for uri, more in (("hf://org/tiny@v2", {}), ("hf://org/tiny", {"REVISION": "v2"})):
        step("model", env_of(hub, tmp_path, uri, **more))
        assert json.loads((tmp_path / "work/model/config.json").read_text())["note"] == "v2"
        step("model", env_of(hub, tmp_path, "hf://org/tiny"))
        assert "note" not in json.loads((tmp_path / "work/model/config.json").read_text())
    with pytest.raises(UsageError, match="two revisions"):
        step("model", env_of(hub, tmp_path, "hf://org/tiny@v2", REVISION="v3"))


def test_a_data_set_and_a_folder_of_it(hub: Hub, tmp_path: Path) -> None:
    root = tmp_path / "hub" / "rows"
    write_jsonl(root / "data" / "train.jsonl", [CHAT])
    write_jsonl(root / "other" / "train.jsonl", [CHAT, CHAT])
    (root / "README.md").write_text("# rows")
    hub.add("org/rows", Repo(root, kind="datasets"))
    tiny_model(tmp_path / "work" / "model")
    env = {"recipe": recipe_file(tmp_path)}
    step("dataset", environment(tmp_path / "work", "hf://org/rows/other", HF_ENDPOINT=hub.endpoint, **env))  # type: ignore[arg-type]
    assert len(texts(tmp_path / "work")) == 2
    step("dataset", environment(tmp_path / "work", "hf://org/rows", HF_ENDPOINT=hub.endpoint, **env))  # type: ignore[arg-type]
    assert len(texts(tmp_path / "work")) == 3
    assert (tmp_path / "work" / "dataset" / "data" / "train.jsonl").is_file()


def test_validate_fetches_into_a_scratch_directory(hub: Hub, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "hub" / "train.jsonl", [CHAT] * 3)
    hub.add("org/rows", Repo(tmp_path / "hub", kind="datasets"))
    (tmp_path / "scratch").mkdir()
    env = env_of(hub, tmp_path, "hf://org/rows", BLUEPRINTS_RECIPE=str(recipe_file(tmp_path)))
    done = run("validate", env | {"TMPDIR": str(tmp_path / "scratch")})
    assert done.returncode == 0
    assert "3 rows" in done.stdout
    assert not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "work").exists()


TOKENS = {"HF_TOKEN": {"HF_TOKEN": "good"}, "ACCESS_TOKEN": {"ACCESS_TOKEN": "good"}}


@pytest.mark.parametrize("variable", TOKENS)
def test_a_gated_model_opens_with_a_token(hub: Hub, tmp_path: Path, variable: str) -> None:
    model_repo(hub, tmp_path, token="good", gated=True)
    assert step("model", env_of(hub, tmp_path, "hf://org/tiny", **TOKENS[variable])) == 0


FAILURES: dict[str, tuple[str, dict[str, object], dict[str, str], type[BlueprintError], str]] = {
    "unknown": ("hf://org/none", {}, {}, UsageError, "no model org/none.*HF_TOKEN"),
    "unknown with a token": ("hf://org/none", {}, {"HF_TOKEN": "good"}, UsageError, "no model org/none"),
    "gated": ("hf://org/tiny", {"token": "good", "gated": True}, {}, UsageError, "gated.*accept its terms.*HF_TOKEN"),
    "gated for this token": (
        "hf://org/tiny", {"token": "good", "gated": True}, {"HF_TOKEN": "bad"}, UsageError, "this token may not",
    ),
    "expired token": ("hf://org/tiny", {}, {"HF_TOKEN": "expired"}, UsageError, "refuses the token.*valid token"),
    "no such revision": ("hf://org/tiny@v9", {}, {}, UsageError, "no revision 'v9'"),
    "server error": ("hf://org/tiny", {"status": 500}, {}, EnvironmentFault, "HTTP 500"),
    "forbidden": ("hf://org/tiny", {"status": 403}, {}, UsageError, "HTTP 403"),
    "damaged": (
        "hf://org/tiny", {"damage": frozenset({"model.safetensors"})}, {}, EnvironmentFault, "safetensors.*damaged",
    ),
    "no name": ("hf://", {}, {}, UsageError, "not a URI"),
    "no repository": ("hf:///x", {}, {}, UsageError, "names no repository|no repository name"),
    "a folder of a model": ("hf://org/tiny/sub", {}, {}, UsageError, "names no repository"),
    "bad characters": ("hf://org/ti ny", {}, {}, UsageError, "no repository name"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_failures_say_what_to_do(hub: Hub, tmp_path: Path, case: str) -> None:
    uri, how, env, error, match = FAILURES[case]
    model_repo(hub, tmp_path, **how)
    with pytest.raises(error, match=f"(?s){match}"):
        step("model", env_of(hub, tmp_path, uri, **env))
    assert not (tmp_path / "work" / "model").exists()
    assert {path.name for path in (tmp_path / "work").iterdir()} <= {".model.lock"}


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"(?s)cannot be reached.*HF_ENDPOINT"):
        step("model", environment(tmp_path / "work", "hf://org/tiny", HF_ENDPOINT="http://127.0.0.1:9"))


def test_a_password_in_the_address_is_never_shown(tmp_path: Path) -> None:
    env = environment(tmp_path / "work", "hf://org/tiny", HF_ENDPOINT="http://me:s3cret@127.0.0.1:9")
    done = run("model", env)
    assert done.returncode == 5
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def test_only_pickles_are_refused_unless_asked(hub: Hub, tmp_path: Path) -> None:
    root = model_repo(hub, tmp_path)
    (root / "model.safetensors").unlink()
    (root / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(DataError, match=r"(?s)pickles alone \(pytorch_model\.bin\).*ignore_patterns"):
        step("model", env_of(hub, tmp_path, "hf://org/tiny"))
    assert step("model", env_of(hub, tmp_path, "hf://org/tiny", IGNORE_PATTERNS="")) == 0
    assert (tmp_path / "work" / "model" / "pytorch_model.bin").is_file()


def test_the_token_is_never_shown(hub: Hub, tmp_path: Path) -> None:
    model_repo(hub, tmp_path, token="good", gated=True)
    done = run("model", env_of(hub, tmp_path, "hf://org/tiny", HF_TOKEN="s3cret-token"))
    assert done.returncode == 2
    assert "s3cret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_during_a_download_ends_at_once(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hub_server as module

    model_repo(hub, tmp_path)
    plain = module.Handler._file
    monkeypatch.setattr(module.Handler, "_file", lambda *args: (time.sleep(20), plain(*args))[1])
    process = spawn("model", env_of(hub, tmp_path, "hf://org/tiny"))
    deadline = time.monotonic() + 20
    while not any("/resolve/" in line for line in hub.requests) and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 143
    assert time.monotonic() - started < 5
    assert not (tmp_path / "work" / "model").exists()
