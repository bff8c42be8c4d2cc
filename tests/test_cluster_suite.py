"""The end-to-end suite for real clusters, offline: against the stand-ins for the API server and for the controllers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from api_server import serving
from cluster_player import Player

ROOT = Path(__file__).resolve().parent.parent
SUITE = [sys.executable, "-m", "pytest", "-q", "-m", "cluster", "-p", "no:cacheprovider", "tests/test_cluster.py"]


def test_without_a_cluster_it_says_so() -> None:
    env = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    made = subprocess.run(["make", "test-cluster"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 2
    assert "KUBECONFIG is not set" in made.stderr


@pytest.mark.slow
def test_the_suite_runs(tmp_path: Path) -> None:
    with serving(namespace="suite") as server:
        server.put("namespaces", {"metadata": {"name": "suite"}})
        player = Player(server)
        player.start()
        try:
            env = {
                **os.environ, "KUBECONFIG": str(server.kubeconfig(tmp_path / "config")),
                "BLUEPRINTS_TEST_NAMESPACE": "suite", "BLUEPRINTS_TEST_TIMEOUT": "60",
            }  # fmt: skip
            result = subprocess.run(SUITE, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
            left = [
                plural for plural in ("trainjobs", "trainingruntimes", "clustertrainingruntimes") if server.all(plural)
            ]
        finally:
            player.close()
    assert result.returncode == 0, result.stdout[-6000:]
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout
    assert left == []  # it has cleaned up
