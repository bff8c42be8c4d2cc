"""How a step says where it is and why it ended: the progress file, the termination message, the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from jobs_kit import until

from blueprints.errors import DataError, Fault, RowsError
from blueprints.progress import Progress, read_progress
from blueprints.termination import LIMIT, read_termination, write_termination


def test_progress_is_written_at_once_for_what_matters_and_seldom_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    progress = Progress(str(path))
    progress.update("download", 0, 10, unit="bytes")
    progress.update("download", 5, 10, unit="bytes")  # too soon after the first
    assert (found := read_progress(path)) is not None
    assert (found["phase"], found["completed"], found["total"], found["unit"]) == ("download", 0, 10, "bytes")
    progress.update("download", 10, 10, unit="bytes")
    assert (found := read_progress(path)) is not None
    assert found["completed"] == 10
    progress.update("train", 1, 4, metrics={"loss": 0.5}, eta_seconds=3, message="on the way")
    assert (found := read_progress(path)) is not None
    assert (found["metrics"], found["eta_seconds"], found["message"]) == ({"loss": 0.5}, 3, "on the way")
    assert list(tmp_path.iterdir()) == [path]


def test_progress_without_a_file_or_a_place_never_stops_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLUEPRINTS_PROGRESS", raising=False)
    Progress().update("train", 1, 2)
    Progress(str(tmp_path / "missing" / "step.json")).update("train", 1, 2)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "half.json").write_text('{"phase": "tr')
    assert read_progress(tmp_path / "half.json") is None


def test_time_left_follows_the_pace(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    progress = Progress(str(path))
    progress.update("prepare", 0, 100)
    progress.update("prepare", 50, 100, force=True)
    assert (found := read_progress(path)) is not None
    assert found["eta_seconds"] is not None
    assert 0 <= found["eta_seconds"] < 5


def test_termination_message_fits_and_the_first_cause_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cause"
    monkeypatch.setenv("BLUEPRINTS_TERMINATION_LOG", str(path))
    faults = [Fault(f"rows.jsonl:{n}", "prompt", "ä" * 80, "text") for n in range(200)]
    write_termination(RowsError(faults, subject="rows.jsonl"))
    write_termination(DataError("a later one"))
    assert path.stat().st_size <= LIMIT
    assert (cause := read_termination(path)) is not None
    assert (cause["code"], cause["exit_code"]) == ("INVALID_DATA", 3)
    assert cause["faults"][0]["where"] == "rows.jsonl:0"
    assert cause["faults_left_out"] is True
    path.write_bytes(b"")
    write_termination(DataError("x" * 9000, todo="y" * 9000))
    assert path.stat().st_size <= LIMIT
    assert json.loads(path.read_text())["exit_code"] == 3


def step(code: str, tmp_path: Path) -> subprocess.Popen[str]:
    """A process whose `main` is `code`, run the way steps run."""
    program = "from blueprints.errors import *\nfrom blueprints.termination import run_main\ndef main():\n"
    program += textwrap.indent(textwrap.dedent(code), "    ") + "\nrun_main(main)\n"
    environment = os.environ | {
        "BLUEPRINTS_TERMINATION_LOG": str(tmp_path / "cause"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("return None", 0, ""),
        ("return 7", 7, ""),
        ("raise UsageError('bad knob', todo='turn it')", 2, "bad knob"),
        ("raise DataError('bad rows')", 3, "bad rows"),
        ("raise EnvironmentFault('no net')", 5, "no net"),
        ("raise OSError(28, 'No space left on device', '/x')", 5, "no space left"),
        ("raise KeyError('oops')", 1, "unexpected KeyError"),
    ],
)
def test_end_of_a_step_is_one_exit_code_and_one_cause(tmp_path: Path, code: str, exit_code: int, said: str) -> None:
    process = step(code, tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_code
    assert said in err
    assert ("Traceback" in err) == (exit_code == 1)
    cause = read_termination(tmp_path / "cause")
    assert (said in cause["problem"]) if cause else not said


def test_sigterm_runs_the_clean_up_and_exits_143(tmp_path: Path) -> None:
    code = f"""
        import pathlib, time
        here = pathlib.Path({str(tmp_path)!r})
        try:
            (here / "started").touch()
            time.sleep(600)
        finally:
            (here / "cleaned").touch()
    """
    process = step(code, tmp_path)
    until((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (tmp_path / "cleaned").exists()
