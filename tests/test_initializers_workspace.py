"""The workspace contract: complete or absent, whatever happens; nothing is done twice; nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
from initializers_kit import (
    CHAT,
    environment,
    manifest,
    prepare,
    recipe_file,
    run,
    sequences,
    spawn,
    step,
    texts,
    tiny_model,
    write_jsonl,
)

from blueprints.digests import hash_file
from blueprints.errors import BlueprintError, DataError, UsageError
from initializers.workspace import Area


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "src" / "rows.jsonl", [CHAT] * 20)


@pytest.fixture
def env(tmp_path: Path, rows: Path) -> dict[str, str]:
    tiny_model(tmp_path / "work" / "model")
    return environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path))


def inode(tmp_path: Path) -> int:
    return (tmp_path / "work" / "dataset").stat().st_ino


def test_the_manifest_tells_everything(tmp_path: Path, env: dict[str, str], rows: Path) -> None:
    step("dataset", env)
    found = manifest(tmp_path / "work")
    assert found["source"] == f"file://{rows}"
    assert found["revision"] is None
    assert len(found["fingerprint"]) == 64
    assert found["files"] == [{"path": "rows.jsonl", "size": rows.stat().st_size, "sha256": hash_file(rows)}]
    assert found["rows"] == {"train": 20}
    assert found["schema"] == {"messages": "list"}
    prepared = found["prepared"]
    assert prepared["method"] == "sft"
    assert prepared["format"] == "messages"
    assert prepared["max_length"] == 1024
    assert prepared["packing"] is False
    assert len(prepared["fingerprint"]) == len(prepared["tokenizer_sha256"]) == 64
    report = prepared["splits"]["train"]
    ids = sequences(tmp_path / "work")
    assert report["rows"] == report["sequences"] == 20
    assert report["truncated"] == report["dropped"] == 0
    assert report["tokens"] == sum(len(row["input_ids"]) for row in ids)
    assert report["trained_tokens"] == sum(sum(row["completion_mask"]) for row in ids)
    (shard,) = report["shards"]
    assert shard["sha256"] == hash_file(tmp_path / "work/dataset/prepared/train" / shard["path"])


def test_again_does_nothing(tmp_path: Path, env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    step("dataset", env)
    before = inode(tmp_path)
    capsys.readouterr()
    step("dataset", env)
    assert inode(tmp_path) == before
    assert "nothing to do" in capsys.readouterr().out


def test_another_recipe_prepares_again_without_fetching(
    tmp_path: Path, env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    step("dataset", env)
    first = manifest(tmp_path / "work")["prepared"]["fingerprint"]
    capsys.readouterr()
    step("dataset", env | {"BLUEPRINTS_OVERRIDES": '["sft.packing=true"]'})
    out = capsys.readouterr().out
    assert "not fetched again" in out
    assert "fetching " not in out
    assert manifest(tmp_path / "work")["prepared"]["fingerprint"] != first
    assert len(sequences(tmp_path / "work")) == 2
    # What does not shape the rows prepares nothing again.
    step("dataset", env | {"BLUEPRINTS_OVERRIDES": '["sft.packing=true", "training.learning_rate=1.0e-5"]'})
    assert "nothing to do" in capsys.readouterr().out


def test_changed_inputs_are_fetched_again(tmp_path: Path, env: dict[str, str], rows: Path) -> None:
    step("dataset", env)
    write_jsonl(rows, [CHAT] * 21)
    step("dataset", env)
    assert manifest(tmp_path / "work")["rows"] == {"train": 21}
    template = tmp_path / "work" / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("|>user", "|>user"))
    before = inode(tmp_path)
    step("dataset", env)
    assert inode(tmp_path) == before
    template.write_text(template.read_text() + " ")
    step("dataset", env)
    assert inode(tmp_path) != before


@pytest.mark.parametrize("name", ["rows.jsonl", "prepared/train/shard-00000.arrow"])
@pytest.mark.parametrize("how", ["longer", "same size", "gone"])
def test_a_damaged_file_is_made_again(tmp_path: Path, env: dict[str, str], name: str, how: str) -> None:
    step("dataset", env)
    path, good = tmp_path / "work" / "dataset" / name, manifest(tmp_path / "work")
    content = path.read_bytes()
    time.sleep(0.01)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content + b"x" if how == "longer" else content[:-1] + b"?")
    step("dataset", env)
    assert path.read_bytes() == content
    assert manifest(tmp_path / "work") == good


def test_a_manifest_that_is_no_manifest(tmp_path: Path, env: dict[str, str]) -> None:
    step("dataset", env)
    for content in ("", "[]", "{", '{"manifest_version": 99}'):
        (tmp_path / "work/dataset/_manifest.json").write_text(content)
        step("dataset", env)
        assert manifest(tmp_path / "work")["rows"] == {"train": 20}


def test_leftovers_of_a_killed_run_are_cleaned_up(tmp_path: Path, env: dict[str, str]) -> None:
    work = tmp_path / "work"
    (work / ".dataset.tmp-4711" / "sub").mkdir(parents=True)
    step("dataset", env)
    assert {path.name for path in work.iterdir()} == {"model", "dataset", ".dataset.lock"}
    # Killed between the two renames of the swap: the old directory comes back.
    (work / "dataset").rename(work / ".dataset.old")
    with Area(work, "dataset").locked():
        assert (work / "dataset" / "_manifest.json").is_file()


def test_killed_at_any_moment_it_recovers(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 20_000)
    tiny_model(tmp_path / "work" / "model")
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path))
    for delay in (0.2, 0.9, 1.6):
        process = spawn("dataset", env)
        time.sleep(delay)
        process.kill()
        process.communicate()
        dataset = tmp_path / "work" / "dataset"
        assert not dataset.exists() or (dataset / "_manifest.json").is_file()
    step("dataset", env)
    assert manifest(tmp_path / "work")["rows"] == {"train": 20_000}
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"model", "dataset", ".dataset.lock"}


def test_sigterm_exits_143_and_leaves_nothing(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 100_000)
    tiny_model(tmp_path / "work" / "model")
    process = spawn("dataset", environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path)))
    deadline = time.monotonic() + 30
    while not list((tmp_path / "work").glob(".dataset.tmp-*/prepared/train/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 143, out + err
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"model", ".dataset.lock"}


def test_two_processes_at_once(tmp_path: Path, env: dict[str, str]) -> None:
    processes = [spawn("dataset", env) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum("nothing to do" in out for out, _ in outputs) == 2
    assert len(texts(tmp_path / "work")) == 20


def test_a_full_disk_exits_5_and_cleans_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        tiny_model(disk / "model")
        rows = write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 8000)
        termination = tmp_path / "termination"
        env = environment(disk, rows, recipe=recipe_file(tmp_path), BLUEPRINTS_TERMINATION_LOG=str(termination))
        done = run("dataset", env)
        assert done.returncode == 5, done.stderr
        assert "no space left" in done.stderr
        assert "Traceback" not in done.stderr
        assert json.loads(termination.read_text())["exit_code"] == 5
        assert {path.name for path in disk.iterdir()} == {"model", ".dataset.lock"}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_directory_that_no_step_made_is_kept(tmp_path: Path, env: dict[str, str], rows: Path) -> None:
    (tmp_path / "work" / "dataset").mkdir()
    step("dataset", env)
    (tmp_path / "work" / "dataset" / "_manifest.json").unlink()
    (tmp_path / "work" / "dataset" / "precious").write_text("x")
    step("dataset", env)
    assert manifest(tmp_path / "work")["rows"] == {"train": 20}
    assert (tmp_path / "work" / "dataset.kept-1" / "precious").read_text() == "x"
    with pytest.raises(UsageError, match="which this step replaces"):
        step("dataset", env | {"STORAGE_URI": f"file://{tmp_path}/work/dataset/rows.jsonl"})
    assert (tmp_path / "work" / "dataset" / "rows.jsonl").read_bytes() == rows.read_bytes()


# --- file:// -------------------------------------------------------------------------------------


def fetched(tmp_path: Path, uri: str, **more: str) -> list[str]:
    step("dataset", environment(tmp_path / "work", uri, **more))
    return [item["path"] for item in manifest(tmp_path / "work")["files"]]


def test_files_directories_globs_links_and_escapes(tmp_path: Path) -> None:
    src = tmp_path / "my src"
    for name in ("a.jsonl", "sub/b.jsonl", ".hidden/c.jsonl", ".d.jsonl", "e [1].jsonl", "100%.jsonl"):
        write_jsonl(src / name, [name])
    (src / "link.jsonl").symlink_to(src / "a.jsonl")
    (src / "circle").symlink_to(src)
    escaped = str(src).replace(" ", "%20")
    everything = ["100%.jsonl", "a.jsonl", "e [1].jsonl", "link.jsonl", "sub/b.jsonl"]
    assert fetched(tmp_path, f"file://{escaped}") == everything
    assert fetched(tmp_path, f"file://localhost{escaped}/") == everything
    assert fetched(tmp_path, f"file://{src}/a.jsonl") == ["a.jsonl"]
    assert fetched(tmp_path, f"file://{src}/.d.jsonl") == [".d.jsonl"]
    assert fetched(tmp_path, f"file://{src}/e [1].jsonl") == ["e [1].jsonl"]
    assert fetched(tmp_path, f"file://{src}/100%.jsonl") == ["100%.jsonl"]
    assert fetched(tmp_path, f"file://{escaped}/*a.jsonl") == ["a.jsonl"]
    assert fetched(tmp_path, f"file://{src}/**/*.jsonl", IGNORE_PATTERNS="circle/*, e *,100*") == [
        "a.jsonl", "link.jsonl", "sub/b.jsonl",
    ]  # fmt: skip
    assert not (tmp_path / "work/dataset/link.jsonl").is_symlink()
    src.rename(tmp_path / "gone")
    assert (tmp_path / "work/dataset/link.jsonl").read_text() == '"a.jsonl"\n'


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("file://rows.jsonl", "no absolute path.*three slashes"),
        ("file://~/rows.jsonl", "no absolute path"),
        ("file:///does/not/exist.jsonl", "does not exist"),
        ("file://{tmp}/*.jsonl", "no file matches"),
        ("file://{tmp}/empty", "no files"),
        ("file://{tmp}/broken.jsonl", "link to .*does not exist"),
        ("file://{tmp}/pipe", "not a regular file"),
        ("s3://bucket/x", "unknown scheme s3.*builtin://, file://, hf://"),
        ("rows.jsonl", "not a URI"),
        ("builtin://nothing", "builtin://orders"),
        ("", "STORAGE_URI is not set"),
    ],
)
def test_sources_that_cannot_be_used(tmp_path: Path, uri: str, match: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jsonl.x").write_text("")
    (tmp_path / "broken.jsonl").symlink_to("/does/not/exist")
    (tmp_path / "broken.jsonl").rename(tmp_path / "broken.tmp") if uri.endswith("*.jsonl") else None
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BlueprintError, match=f"(?s){match}") as caught:
        step("dataset", environment(tmp_path / "work", uri.format(tmp=tmp_path)))
    assert caught.value.exit_code in (2, 3)


def test_a_workspace_can_be_the_source_of_another(tmp_path: Path, env: dict[str, str]) -> None:
    step("dataset", env)
    again = env | {"STORAGE_URI": f"file://{tmp_path}/work/dataset", "BLUEPRINTS_WORKSPACE": f"{tmp_path}/other"}
    for _ in range(2):
        step("model", again | {"STORAGE_URI": f"file://{tmp_path}/work/model"})
    step("dataset", again)
    assert [item["path"] for item in manifest(tmp_path / "other")["files"]] == ["rows.jsonl"]
    assert sequences(tmp_path / "other") == sequences(tmp_path / "work")
    write_jsonl(tmp_path / "src" / "prepared" / "train.jsonl", [CHAT])
    with pytest.raises(UsageError, match="prepared/, which the workspace keeps"):
        step("dataset", env | {"STORAGE_URI": f"file://{tmp_path}/src"})


def test_exit_codes_of_settings(tmp_path: Path, rows: Path) -> None:
    env = environment(tmp_path / "work", rows, recipe=recipe_file(tmp_path))
    for bad in ("[1]", "{}", "x", '["a"', '["sft.packin=true"]'):
        done = run("dataset", env | {"BLUEPRINTS_OVERRIDES": bad})
        assert done.returncode == 2, (bad, done.stderr)
        assert "Traceback" not in done.stderr
    assert run("dataset", env | {"BLUEPRINTS_RECIPE": "no-such-recipe"}).returncode == 2
    assert run("dataset", env | {"STORAGE_URI": ""}).returncode == 2
    assert run("nothing", env).returncode == 2
    no_model = run("dataset", env)
    assert no_model.returncode == 3
    assert "run the model initializer first" in no_model.stderr


def test_rows_of_another_method_are_refused(tmp_path: Path, env: dict[str, str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(path.read_text().replace("method: sft", "method: dpo"))
    with pytest.raises(DataError, match=r"messages.*dpo does not take(?s:.)*preference \(chosen, rejected\)"):
        step("dataset", env)


# --- models ---------------------------------------------------------------------------------------


def test_the_embedded_model_and_data(tmp_path: Path) -> None:
    assert step("model", environment(tmp_path / "work", "builtin://tiny-llama")) == 0
    found = manifest(tmp_path / "work", "model")
    assert found["model_type"] == "llama"
    assert found["parameters"] > 100_000
    assert step("dataset", environment(tmp_path / "work", "builtin://orders", recipe="quickstart")) == 0
    report = manifest(tmp_path / "work")["prepared"]["splits"]
    assert report["train"]["rows"] > 1000
    assert report["eval"]["rows"] > 100
    assert manifest(tmp_path / "work")["prepared"]["notes"]["unended"] == 0


def model_step(tmp_path: Path, root: Path) -> int:
    return step("model", environment(tmp_path / "work", root))


def test_a_good_model_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tiny_model(tmp_path / "m")
    assert model_step(tmp_path, root) == 0
    capsys.readouterr()
    assert model_step(tmp_path, root) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert manifest(tmp_path / "work", "model")["parameters"] == 1
    assert (tmp_path / "work" / "model" / "chat_template.jinja").is_file()


def damage(root: Path, what: str) -> None:
    weights = root / "model.safetensors"
    content = weights.read_bytes()
    if what == "no config":
        (root / "config.json").unlink()
    elif what == "config":
        (root / "config.json").write_text("{")
    elif what == "cut":
        weights.write_bytes(content[:-1])
    elif what == "grown":
        weights.write_bytes(content + b"x")
    elif what == "header":
        weights.write_bytes(b"\xff" * 8 + content[8:])
    elif what == "empty":
        weights.write_bytes(b"")
    elif what == "shape":
        weights.write_bytes(content.replace(b"[1]", b"[2]"))
    elif what == "index":
        index = {"weight_map": {"weight": "model.safetensors", "other": "model-2.safetensors"}}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
    elif what == "tensor":
        index = {"weight_map": {"other": "model.safetensors"}}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
    elif what == "pickle":
        weights.rename(root / "pytorch_model.bin")
    elif what == "lfs":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    elif what in ("sizes", "untyped"):
        tensor = {"shape": ["x"], "dtype": "F32"} if what == "sizes" else {"shape": [1]}
        header = json.dumps({"weight": tensor | {"data_offsets": [0, 4]}}).encode()
        weights.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    elif what == "deep":
        weights.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)
    elif what == "tokenizer":
        (root / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("no config", "no config.json"), ("config", "config.json: not JSON"), ("cut", "model.safetensors.*bytes"),
        ("grown", "model.safetensors.*bytes"), ("header", "header"), ("empty", "too short"), ("shape", "do not fit"),
        ("index", "model-2.safetensors, which is not there"), ("tensor", "tensor other is not in"),
        ("lfs", "a Git LFS pointer"), ("sizes", "without offsets, shape"), ("untyped", "without offsets, shape or dtype"),
        ("deep", "not JSON"), ("pickle", "no weights in safetensors.*pickles"), ("tokenizer", "no tokenizer files"),
    ],
)  # fmt: skip
def test_a_damaged_model_is_refused(tmp_path: Path, what: str, match: str) -> None:
    root = tiny_model(tmp_path / "m")
    damage(root, what)
    with pytest.raises(DataError, match=f"(?s){match}"):
        model_step(tmp_path, root)
    assert not (tmp_path / "work" / "model").exists()


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="an adapter, not a model"):
        model_step(tmp_path, tmp_path / "m")


# --- cost -----------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from initializers.__main__ import _quiet_libraries, main
_quiet_libraries()
main(["dataset"])
print("peak MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
print("torch" if sys.modules.get("torch") else "no torch")
"""


def peak_memory(tmp_path: Path, rows: Path, name: str) -> int:
    import sys

    from initializers_kit import ROOT

    tiny_model(tmp_path / name / "model")
    env = environment(tmp_path / name, rows, recipe=recipe_file(tmp_path, "sft: {packing: true}"))
    env |= {"BLUEPRINTS_OVERRIDES": '["dataset.overlong=drop", "dataset.test_size=0.01"]', "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], env=dict(os.environ) | env, check=True, capture_output=True, text=True
    )
    assert "no torch" in done.stdout
    return int(done.stdout.split("peak MiB")[1].split()[0])


def big_file(path: Path, megabytes: int) -> Path:
    answer = {"role": "assistant", "content": "word " * 150}
    line = json.dumps({"messages": [CHAT["messages"][0], answer]}) + "\n"
    with path.open("w") as file:
        for _ in range(megabytes * 1_000_000 // len(line)):
            file.write(line)
    return path


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    small = peak_memory(tmp_path, big_file(tmp_path / "small.jsonl", 30), "small")
    large = peak_memory(tmp_path, big_file(tmp_path / "large.jsonl", 300), "large")
    assert large < small + 60, (small, large)


def test_memory_is_flat_on_a_middling_file(tmp_path: Path) -> None:
    small = peak_memory(tmp_path, big_file(tmp_path / "small.jsonl", 2), "small")
    large = peak_memory(tmp_path, big_file(tmp_path / "large.jsonl", 8), "large")
    assert large < small + 80, (small, large)


def test_the_help_teaches() -> None:
    done = run("--help", {})
    assert done.returncode == 0
    assert "STORAGE_URI" in done.stdout
    assert "BLUEPRINTS_RECIPE" in done.stdout
    assert "exit codes" in done.stdout


def test_prepared_is_deterministic(tmp_path: Path, rows: Path) -> None:
    first = prepare(tmp_path, rows, "sft: {packing: true}\n")
    shards = first["splits"]["train"]["shards"]
    (tmp_path / "work" / "dataset").rename(tmp_path / "elsewhere")
    assert prepare(tmp_path, rows, "sft: {packing: true}\n")["splits"]["train"]["shards"] == shards
