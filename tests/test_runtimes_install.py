"""`blueprints runtimes diff` and `apply` against a stand-in for the API server.

The stand-in speaks the part of the protocol that is used here: GET, and server-side apply with dry run, field managers,
conflicts and immutable fields, as Kubernetes 1.36 with Trainer 2.3 answers.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from blueprints import install
from blueprints.cli import main
from blueprints.runtimes import get_runtime, shipped_runtimes

Manifest = dict[str, Any]
NAME = get_runtime("llm-sft")["metadata"]["name"]


class Stand(ThreadingHTTPServer):
    """A stand-in API server with one store of runtimes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Manifest] = {}
        self.managers: dict[str, str] = {}
        self.requests: list[tuple[str, str, bool]] = []
        """Method, name, dry run."""
        self.failures: list[int] = []
        """Status codes that the next requests get."""

    @property
    def written(self) -> list[str]:
        """Names that were really applied."""
        return [name for method, name, dry_run in self.requests if method == "PATCH" and not dry_run]


class _Handler(BaseHTTPRequestHandler):
    server: Stand

    def do_GET(self) -> None:
        name = self._start()
        if name is None:
            return
        live = self.server.objects.get(name)
        self._answer(200, live) if live else self._status(404, f'"{name}" not found')

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self._start()
        if name is None:
            return
        query = parse_qs(urlsplit(self.path).query)
        assert self.headers["Content-Type"] == "application/apply-patch+yaml"
        assert query["fieldManager"] == ["llm-blueprints"]
        assert "force" not in query
        live = self.server.objects.get(name)
        if (
            live
            and self.server.managers.get(name, "llm-blueprints") != "llm-blueprints"
            and live["spec"] != body["spec"]
        ):
            message = f'Apply failed with 1 conflict: conflict with "{self.server.managers[name]}": .spec'
            self._status(409, message)
            return
        if live and _fixed(live) != _fixed(body):
            message = f"{name} is invalid: spec.template.spec.successPolicy: Invalid value: Value is immutable"
            self._status(422, message)
            return
        after = copy.deepcopy(body)
        after["metadata"]["resourceVersion"] = str(len(self.server.requests))
        after["metadata"]["managedFields"] = [{"manager": "llm-blueprints"}]
        if query.get("dryRun") != ["All"]:
            self.server.objects[name] = after
        self._answer(200 if live else 201, after)

    def _start(self) -> str | None:
        parts = urlsplit(self.path)
        name = parts.path.rpartition("/")[2]
        self.server.requests.append((self.command, name, "dryRun" in parts.query))
        if self.server.failures:
            self._status(self.server.failures.pop(0), "not now")
            return None
        return name

    def _status(self, code: int, message: str) -> None:
        self._answer(code, {"kind": "Status", "code": code, "message": message})

    def _answer(self, code: int, body: Manifest) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _fixed(manifest: Manifest) -> Any:
    return manifest["spec"]["template"]["spec"].get("successPolicy")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setattr(install, "PAUSES", (0.0, 0.0))
    with Stand() as stand:
        thread = threading.Thread(target=stand.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield stand
        stand.shutdown()
        thread.join()


@pytest.fixture
def config(server: Stand, tmp_path: Path) -> str:
    address = f"http://127.0.0.1:{server.server_address[1]}"
    path = tmp_path / "config"
    contexts = [("here", address), ("elsewhere", "http://127.0.0.1:9")]
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": name, "cluster": {"server": url}} for name, url in contexts],
                "contexts": [{"name": name, "context": {"cluster": name, "user": "me"}} for name, _ in contexts],
                "users": [{"name": "me", "user": {"token": "secret-token"}}],
                "current-context": "here",
            }
        )
    )
    return str(path)


def test_apply_creates_then_finds_nothing_to_do(server: Stand, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtimes", "apply", "--kubeconfig", config]) == 0
    assert set(server.objects) == set(shipped_runtimes())
    assert all(line.endswith(" created") for line in capsys.readouterr().out.splitlines())
    # Every runtime is tried before the first is written.
    first = server.requests.index(("PATCH", server.written[0], False))
    assert {name for _, name, dry_run in server.requests[:first] if dry_run} == set(shipped_runtimes())
    assert main(["runtimes", "apply", "--kubeconfig", config]) == 0
    assert len(server.written) == len(shipped_runtimes())
    assert all(line.endswith(" unchanged") for line in capsys.readouterr().out.splitlines())


def test_diff_and_dry_run_change_nothing(server: Stand, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    live = get_runtime("llm-sft")
    live["spec"]["mlPolicy"]["numNodes"] = 7
    server.objects[NAME] = live
    assert main(["runtimes", "diff", "llm-sft", "llm-dpo", "--kubeconfig", config]) == 0
    shown = capsys.readouterr()
    assert "-    numNodes: 7\n+    numNodes: 1\n" in shown.out
    assert "resourceVersion" not in shown.out
    assert shown.err == "1 new, 1 changed, 0 unchanged\n"
    assert main(["runtimes", "apply", "llm-sft", "--dry-run", "--kubeconfig", config]) == 0
    assert capsys.readouterr().out == f"{NAME} changed (dry run)\n"
    assert server.written == []
    assert main(["runtimes", "apply", "llm-sft", "--kubeconfig", config]) == 0
    assert server.objects[NAME]["spec"]["mlPolicy"]["numNodes"] == 1


def test_what_is_not_ours_stays_and_nothing_else_is_written(
    server: Stand, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = get_runtime("llm-dpo")
    foreign["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "Helm"
    server.objects[foreign["metadata"]["name"]] = foreign
    server.objects[NAME] = get_runtime("llm-sft")
    server.objects[NAME]["spec"]["template"]["spec"]["successPolicy"] = {"operator": "Any"}
    other = get_runtime("llm-qat")
    other["spec"]["mlPolicy"]["numNodes"] = 3
    server.objects[other["metadata"]["name"]] = other
    server.managers[other["metadata"]["name"]] = "kubectl"
    assert main(["runtimes", "apply", "--kubeconfig", config]) == 2
    said = capsys.readouterr().err
    assert "nothing was changed in http://127.0.0.1" in said
    assert "exists and is not ours (app.kubernetes.io/managed-by: Helm)" in said
    assert "give the changed runtimes a new version" in said
    assert 'conflict with "kubectl"' in said
    assert "3 faults" in said
    assert server.written == []


def test_a_hiccup_is_tried_again(server: Stand, config: str) -> None:
    server.failures = [503, 429]
    assert main(["runtimes", "apply", "llm-sft", "--kubeconfig", config]) == 0
    assert server.written == [NAME]


@pytest.mark.parametrize(
    ("failures", "message"),
    [([503] * 9, "HTTP 503"), ([403], "runtimes/rbac"), ([401], "HTTP 401"), ([404, 404], "install Kubeflow Trainer")],
)
def test_what_the_server_says_is_explained(
    server: Stand, config: str, failures: list[int], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failures = failures
    assert main(["runtimes", "apply", "llm-sft", "--kubeconfig", config]) == 5
    said = capsys.readouterr().err
    assert message in said
    assert "secret-token" not in said


def test_context_chooses_the_cluster(server: Stand, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtimes", "diff", "llm-sft", "--kubeconfig", config, "--context", "elsewhere"]) == 5
    assert "no answer from the API server" in capsys.readouterr().err
    assert server.requests == []
    assert main(["runtimes", "diff", "--kubeconfig", config, "--context", "nowhere"]) == 5
    assert "nowhere" in capsys.readouterr().err
