"""The verbs about jobs, as a user types them: real processes, real exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from jobs_kit import python, tiny_job, tiny_runtime, until

from blueprints.backends.local import LocalBackend

COMMAND = [sys.executable, "-m", "blueprints"]
EMBEDDED = ["sft", "model=builtin://tiny-llama", "dataset=builtin://orders", "resources.gpu=0"]
NAPPING = python("""
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("napping", flush=True)
    time.sleep(600)
""")


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    """The backend the command line uses in this test."""
    monkeypatch.setenv("BLUEPRINTS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    backend = LocalBackend()
    yield backend
    for name in backend.names():
        backend.delete(name, force=True)


def run(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`blueprints words...`"""
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=timeout, check=False)


def test_render_writes_a_train_job(backend: LocalBackend, tmp_path: Path) -> None:
    result = run("render", *EMBEDDED, "lora={r: 4}", "--name", "demo")
    assert (result.returncode, result.stderr) == (0, "")
    job = yaml.safe_load(result.stdout)
    assert (job["kind"], job["metadata"]["name"]) == ("TrainJob", "demo")
    assert run("render", *EMBEDDED, "-o", str(tmp_path / "job.yaml")).returncode == 0
    again = run("render", *EMBEDDED)
    assert (tmp_path / "job.yaml").read_text() == again.stdout
    assert run("render", *EMBEDDED, "-o", str(tmp_path / "no" / "job.yaml")).returncode == 2
    assert backend.names() == []


@pytest.mark.parametrize("name", ["Big", "9lives", "a" * 34, "a_b", "-a", ""])
@pytest.mark.parametrize("verb", ["train", "render"])
@pytest.mark.usefixtures("backend")
def test_invalid_name_is_told_with_the_rule(verb: str, name: str) -> None:
    result = run(verb, *EMBEDDED, f"--name={name}")
    assert result.returncode == 2
    assert "at most 33 characters" in result.stderr
    assert "Traceback" not in result.stderr


def test_dry_run_shows_the_job_and_runs_nothing(backend: LocalBackend) -> None:
    result = run("train", *EMBEDDED, "--dry-run")
    assert result.returncode == 0
    assert yaml.safe_load(result.stdout)["kind"] == "TrainJob"  # the steps are comments
    assert "python -m initializers dataset" in result.stdout
    assert "python -m trainers.launch torchrun -m trainers --recipe sft" in result.stdout
    data = json.loads(run("train", *EMBEDDED, "--dry-run", "--json").stdout)
    assert [step["name"] for step in data["steps"]] == ["model-initializer", "dataset-initializer", "node-0"]
    assert backend.names() == []


def test_job_is_listed_shown_followed_waited_for_and_deleted(backend: LocalBackend) -> None:
    slow = python("import time\nfor n in range(5): print('line', n, flush=True); time.sleep(0.3)")
    backend.start(tiny_job("walk"), tiny_runtime(slow, dataset=python("print('rows')")))
    logs = run("logs", "walk", "--follow")
    assert logs.returncode == 0
    assert logs.stdout.splitlines() == ["[dataset-initializer] rows", *(f"[node-0] line {n}" for n in range(5))]
    assert run("logs", "walk", "--step", "node-0").stdout.splitlines() == [f"line {n}" for n in range(5)]
    assert run("wait", "walk").returncode == 0
    listed = run("jobs").stdout.splitlines()
    assert re.match(r"NAME +STATE", listed[0])
    assert re.match(r"walk +Complete +tiny", listed[1])
    assert json.loads(run("jobs", "--json").stdout)[0]["name"] == "walk"
    shown = run("get", "walk")
    assert "walk: Complete" in shown.stdout
    assert str(backend.directory("walk").path) in shown.stdout
    data = json.loads(run("get", "walk", "--json").stdout)
    assert (data["status"], data["exit_code"], len(data["steps"])) == ("Complete", 0, 2)
    assert run("delete", "walk").returncode == 0
    assert run("get", "walk").returncode == 2


def test_names_that_do_not_exist_lead_to_near_ones(backend: LocalBackend) -> None:
    backend.start(tiny_job("orders-a"), tiny_runtime(["true"]))
    for verb in ("get", "logs", "wait", "delete"):
        result = run(verb, "order-a")
        assert result.returncode == 2
        assert "did you mean orders-a?" in result.stderr
    assert run("delete", "orders-a", "nothing").returncode == 2
    assert backend.names() == ["orders-a"]
    result = run("logs", "orders-a", "--step", "node-9")
    assert result.returncode == 2
    assert "node-0" in result.stderr


@pytest.mark.parametrize(("code", "outcome"), [(0, 0), (2, 2), (3, 3), (5, 5), (1, 4)])
def test_wait_ends_as_the_job_did(backend: LocalBackend, code: int, outcome: int) -> None:
    backend.start(tiny_job("end"), tiny_runtime(python(f"print('the reason'); raise SystemExit({code})")))
    result = run("wait", "end")
    assert result.returncode == outcome
    if code:
        assert "step node-0" in result.stderr
        assert "the reason" in result.stderr
    assert json.loads(run("wait", "end", "--json").stdout)["exit_code"] == outcome


def test_wait_with_a_limit_says_that_it_still_runs(backend: LocalBackend) -> None:
    backend.start(tiny_job("nap"), tiny_runtime(NAPPING))
    result = run("wait", "nap", "--timeout", "0.5")
    assert result.returncode == 4
    assert "still Running" in result.stderr


def test_waiting_for_a_job_that_is_deleted_ends_with_a_clear_error(backend: LocalBackend) -> None:
    backend.start(tiny_job("nap"), tiny_runtime(NAPPING))
    waiting = threading.Timer(1.0, backend.delete, ("nap",), {"force": True})
    waiting.start()
    result = run("wait", "nap", "--timeout", "30")
    waiting.join()
    assert result.returncode == 4
    assert "bug" not in result.stderr


def test_running_job_is_deleted_only_by_force(backend: LocalBackend) -> None:
    backend.start(tiny_job("nap"), tiny_runtime(NAPPING))
    result = run("delete", "nap")
    assert result.returncode == 2
    assert "--force" in result.stderr
    assert run("delete", "nap", "--force").returncode == 0
    assert backend.names() == []


@pytest.mark.usefixtures("backend")
def test_detached_job_is_named_with_how_to_follow_it() -> None:
    result = run("train", *EMBEDDED, "--name", "later", "--detach")
    assert result.returncode == 0
    assert result.stdout.splitlines()[0] == "later"
    assert "blueprints logs later --follow" in result.stdout
    result = run("train", *EMBEDDED, "--name", "later")
    assert result.returncode == 2
    assert "is running" in result.stderr
    assert run("delete", "later", "--force").returncode == 0
    data = json.loads(run("train", *EMBEDDED, "--name", "later", "--detach", "--json").stdout)
    assert data["name"] == "later"


@pytest.mark.usefixtures("backend")
def test_step_that_fails_is_explained_with_its_exit_code(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    words = ["sft", "model=builtin://tiny-llama", f"dataset=file://{rows}", "resources.gpu=0", "--name", "rows"]
    result = run("train", *words)
    assert result.returncode == 3, result.stdout + result.stderr
    assert "model-initializer: finished" in result.stdout
    assert "dataset-initializer: failed with exit code 3" in result.stdout
    assert "rows.jsonl" in result.stderr
    assert "completion" in result.stderr
    assert "Traceback" not in result.stderr
    data = json.loads(run("get", "rows", "--json").stdout)
    assert (data["status"], data["exit_code"], data["failed_step"]) == ("Failed", 3, "dataset-initializer")
    data = json.loads(run("train", *words, "--json").stdout)  # same name, same recipe: tried again
    assert (data["runs"], data["exit_code"]) == (2, 3)
    result = run("train", *words, "training.seed=7")
    assert result.returncode == 2
    assert "blueprints delete rows" in result.stderr


def start(*words: str, **options: object) -> subprocess.Popen[str]:
    """`blueprints words...` in a process group of its own, as a terminal starts it."""
    return subprocess.Popen([*COMMAND, *words], text=True, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]  # options of Popen


def test_ctrl_c_stops_the_job_and_says_how_to_go_on(backend: LocalBackend) -> None:
    client = start("train", *EMBEDDED, "--name", "halt", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: "halt" in backend.names() and backend.get("halt").state == "Running")
    time.sleep(0.3)
    os.killpg(client.pid, signal.SIGINT)  # to the whole group, as a terminal does
    out, err = client.communicate(timeout=120)
    assert client.returncode == 130, out + err
    assert "stopping gracefully (Ctrl-C again to kill)" in out
    assert "blueprints train sft" in err
    assert "--name halt" in err
    assert (backend.get("halt").state, backend.get("halt").reason) == ("Failed", "Stopped")


def test_client_that_is_terminated_leaves_the_job_running(backend: LocalBackend) -> None:
    client = start("train", *EMBEDDED, "--name", "left", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: "left" in backend.names() and backend.get("left").state == "Running")
    time.sleep(0.3)
    client.send_signal(signal.SIGHUP)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 143
    assert "the job goes on" in err
    assert backend.directory("left").is_owned()


@pytest.mark.usefixtures("backend")
def test_terminal_gets_a_live_view() -> None:
    rows, columns = 40, 120
    reader, writer = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "LINES": str(rows), "COLUMNS": str(columns)}
    client = start("train", *EMBEDDED, "--name", "seen", stdout=writer, stderr=writer, stdin=writer, env=environment)
    os.close(writer)
    screen = b""
    try:
        while b"dataset-initializer" not in screen or b"\x1b[" not in screen:
            screen += os.read(reader, 4096)
        os.killpg(client.pid, signal.SIGINT)
        while True:
            screen += os.read(reader, 4096)
    except OSError:  # the terminal closes with its last process
        pass
    assert client.wait(timeout=60) == 130
    assert "model-initializer" in screen.decode(errors="replace")


def test_without_a_home_that_can_be_written_the_error_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLUEPRINTS_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    result = run("train", *EMBEDDED)
    assert result.returncode == 5
    assert "BLUEPRINTS_HOME" in result.stderr
