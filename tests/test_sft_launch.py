"""`python -m trainers.launch`: torchrun's exit codes made right, and Kubeflow's progress endpoint."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sft_workspace import build, command, environment, train_here

WORKER = """
import os, sys, time
from trainers import process
process.register()
code = {code}
if os.environ["RANK"] == "1":
    time.sleep({lag})
process.leave_exit_code(code)
os._exit(code)
"""


def launch(root: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher on torchrun with these arguments."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return subprocess.run(
        [sys.executable, "-m", "trainers.launch", torchrun, *arguments], env=environment(root) | extra, cwd=root,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False,
    )  # fmt: skip


def test_the_exit_code_is_that_of_the_first_failure(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(code='3 if os.environ["RANK"] == "0" else 5', lag=0.5))
    done = launch(tmp_path, "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(worker))
    assert done.returncode == 3, done.stdout
    assert "Traceback" not in done.stdout


def test_torchrun_hands_arguments_on_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import json, sys; json.dump(sys.argv[1:], open('argv.json', 'w'))")
    given = ["a=$$ $local_rank ${local_rank} $(HOME) $", "b=c\nd"]
    here = environment(tmp_path)["PYTHONPATH"] + os.pathsep + str(tmp_path)
    done = launch(tmp_path, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "show", *given, PYTHONPATH=here)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "argv.json").read_text()) == given


def test_a_port_in_use_is_the_environments_fault(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = launch(tmp_path, "worker.py", PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=port, PET_NNODES="1",
                      PET_NODE_RANK="0", PET_NPROC_PER_NODE="1")  # fmt: skip
    assert done.returncode == 5, done.stdout
    assert "address already in use" in done.stdout
    assert "Traceback" not in done.stdout
    assert json.loads((tmp_path / "termination").read_text())["exit_code"] == 5


def test_a_killed_process_is_told_from_a_failed_one(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = launch(tmp_path, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "worker.py")
    assert done.returncode == 137, done.stdout
    assert "killed by SIGKILL" in done.stdout


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "trainers.launch", "torchrunn"], env=environment(tmp_path), text=True,
                          stderr=subprocess.PIPE, check=False)  # fmt: skip
    assert done.returncode == 2
    assert "torchrunn" in done.stderr


def test_a_second_signal_kills(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        "import signal, time\nfrom trainers import process\nprocess.register()\nprocess.STOP.at_step_end()\n"
        "open('ready', 'w').close()\ntime.sleep(60)\ntime.sleep(60)\n"
    )
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    running = subprocess.Popen(
        [sys.executable, "-m", "trainers.launch", torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
         "worker.py"], env=environment(tmp_path), cwd=tmp_path,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 143


def test_no_training_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    root = build(tmp_path)
    with (root / "log").open("w") as log:
        running = subprocess.Popen(command(root, "training.max_steps=100000", launch=True), env=environment(root),
                                   cwd=root, stdout=log, stderr=log)  # fmt: skip
    deadline = time.monotonic() + 90
    while not (root / "output" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.kill()
    running.wait()
    time.sleep(3)
    size = (root / "output" / "metrics.jsonl").stat().st_size
    time.sleep(1)
    assert (root / "output" / "metrics.jsonl").stat().st_size == size


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Stands in for the controller's status endpoint; TLS is the one thing it lacks."""

    seen: list[dict[str, object]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(json.loads(body)["trainerStatus"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        return None


def test_kubeflows_endpoint_hears_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    (root / "token").write_text("secret")
    Endpoint.seen = []
    server = http.server.HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(root / "token"))
    assert train_here(root, monkeypatch, "training.max_steps=2") == 0
    server.shutdown()
    assert Endpoint.seen[0]["progressPercentage"] == 0
    assert Endpoint.seen[-1]["progressPercentage"] == 100
    assert all("lastUpdatedTime" in status for status in Endpoint.seen)
    assert os.environ["KUBEFLOW_TRAINER_SERVER_URL"]
