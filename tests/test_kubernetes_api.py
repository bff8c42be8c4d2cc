"""Calls to the API server (a stand-in on loopback): retries, pages, watches that survive, refusals in plain words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, Request, serving, times
from jobs_kit import until

from blueprints.backends.kubernetes.api import PODS, SECRETS, TRAINJOBS, ApiError, Cluster, GoneError, Informer
from blueprints.errors import UsageError


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with serving() as running:
        yield running


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path, pauses: list[float]) -> Cluster:
    found = Cluster.connect(kubeconfig=str(server.kubeconfig(tmp_path / "config")))
    found.pause = pauses.append
    return found


def secret(name: str = "s", **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, **metadata}}


def on(method: str, answer: Any) -> Any:
    return lambda request: request.method == method and answer(request)


def test_context_and_namespace_are_chosen(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(server.kubeconfig(tmp_path / "config"))
    assert Cluster.connect(kubeconfig=path).namespace == "team"
    assert Cluster.connect(kubeconfig=path, context="other").namespace == "elsewhere"
    assert Cluster.connect(kubeconfig=path, namespace="mine").namespace == "mine"
    monkeypatch.setenv("KUBECONFIG", path)
    for wrong in ({"context": "none"}, {"kubeconfig": str(tmp_path / "nowhere")}):
        with pytest.raises(UsageError, match="no cluster is configured"):
            Cluster.connect(**wrong)


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_what_may_pass_is_tried_again(cluster: Cluster, server: ApiServer, pauses: list[float], status: int) -> None:
    server.put("secrets", secret())
    server.faults.append(times(3, lambda request: request.refuse(status, "busy")))
    assert cluster.get(SECRETS, "s")["metadata"]["name"] == "s"
    assert len(pauses) == 3
    assert pauses[0] <= 0.25
    assert max(pauses) <= 1.0


def test_a_server_says_when_to_come_back(cluster: Cluster, server: ApiServer, pauses: list[float]) -> None:
    server.faults.append(times(1, lambda request: request.refuse(429, "slow down", Retry_After="7")))
    assert cluster.find(SECRETS, "none") is None
    assert pauses == [7.0]


def test_cut_connections_are_tried_again_and_given_up_at_last(cluster: Cluster, server: ApiServer) -> None:
    server.put("secrets", secret())
    server.faults.append(times(2, Request.cut))
    assert cluster.get(SECRETS, "s")
    server.faults[:] = [Request.cut]
    before = len(server.requests)
    with pytest.raises(ApiError, match="cannot be reached"):
        cluster.get(SECRETS, "s")
    assert len(server.requests) == before + 6


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_refusals_are_told_in_the_servers_words_at_once(cluster: Cluster, server: ApiServer, status: int) -> None:
    server.faults.append(lambda request: request.refuse(status, "you may not"))
    with pytest.raises(ApiError, match="you may not") as caught:
        cluster.get(SECRETS, "s")
    assert caught.value.status == status
    assert caught.value.todo
    assert len(server.requests) == 1


def test_an_object_whose_creation_was_not_answered_is_not_created_twice(cluster: Cluster, server: ApiServer) -> None:
    def created_but_cut(request: Request) -> bool:
        server.put("secrets", request.body or {})
        return request.cut()

    server.faults.append(times(1, on("POST", created_but_cut)))
    body = secret(annotations={"id": "1"})
    assert cluster.create(SECRETS, body)["metadata"]["name"] == "s"
    with pytest.raises(ApiError, match="already exists"):
        cluster.create(SECRETS, body)
    server.faults.append(times(1, on("POST", Request.cut)))
    with pytest.raises(ApiError, match="already exists"):  # somebody else's
        cluster.create(SECRETS, secret(annotations={"id": "2"}))


def test_lists_come_in_pages_and_begin_again_when_forgotten(cluster: Cluster, server: ApiServer) -> None:
    for number in range(1234):
        server.put("pods", {"metadata": {"name": f"p{number}", "labels": {"a": str(number % 2)}}})
    assert len(cluster.find_all(PODS)) == 1234
    assert len([line for line in server.requests if "limit=" in line]) == 3
    assert len(cluster.find_all(PODS, labels="a=1")) == 617

    def forget(request: Request) -> bool:
        if "continue" in request.query:
            server.forget()
            server.put("pods", {"metadata": {"name": "last"}})
            server.faults.clear()
        return False

    server.faults.append(forget)
    found = [item["metadata"]["name"] for item in cluster.find_all(PODS)]
    assert len(found) == len(set(found)) == 1235


def test_deletion_is_in_the_background(cluster: Cluster, server: ApiServer) -> None:
    server.put("trainjobs", {"metadata": {"name": "a"}})
    seen: list[Any] = []
    server.faults.append(lambda request: bool(seen.append(request.body)) and False)
    assert cluster.delete(TRAINJOBS, "a")
    assert seen[0]["propagationPolicy"] == "Background"
    assert not cluster.delete(TRAINJOBS, "a")


def names(informer: Informer) -> list[str]:
    return sorted(item["metadata"]["name"] for item in informer.items())


def test_a_watch_survives_cuts_expiry_and_restarts_without_missing_or_repeating(
    cluster: Cluster, server: ApiServer
) -> None:
    cluster.pause = lambda _: None
    server.put("pods", {"metadata": {"name": "p0", "labels": {"j": "x"}}})
    changed = threading.Event()
    informer = Informer(cluster, PODS, lambda _: changed.set(), labels="j=x").start()
    seen: list[list[str]] = [names(informer)]

    def next_state() -> list[str]:
        assert changed.wait(10)
        changed.clear()
        seen.append(names(informer))
        return seen[-1]

    changed.clear()
    server.put("pods", {"metadata": {"name": "p1", "labels": {"j": "x"}}})
    assert next_state() == ["p0", "p1"]
    server.hang_up()
    server.put("pods", {"metadata": {"name": "other", "labels": {"j": "y"}}})
    server.put("pods", {"metadata": {"name": "p2", "labels": {"j": "x"}}})
    assert next_state() == ["p0", "p1", "p2"]
    server.forget()
    server.hang_up()
    server.remove("pods", "p0")
    assert next_state() == ["p1", "p2"]
    server.faults.append(times(4, lambda request: request.refuse(503, "restarting")))
    server.hang_up()
    server.put("pods", {"metadata": {"name": "p3", "labels": {"j": "x"}}})
    assert next_state() == ["p1", "p2", "p3"]
    server.hang_up()
    server.hang_up()
    assert not changed.wait(1.0)  # nothing has changed: nothing is told
    informer.stop()


def test_a_watch_that_is_refused_for_good_ends_with_the_reason(cluster: Cluster, server: ApiServer) -> None:
    server.faults.append(lambda request: request.refuse(403, "pods is forbidden"))
    with pytest.raises(ApiError, match="forbidden"):
        Informer(cluster, PODS, lambda _: None).start()
    server.faults.clear()
    informer = Informer(cluster, PODS, lambda _: None).start()
    server.faults.append(lambda request: request.refuse(403, "no longer"))
    server.hang_up()
    assert until(lambda: informer.failure is not None)


def test_an_expired_watch_says_so(cluster: Cluster, server: ApiServer) -> None:
    server.put("pods", {"metadata": {"name": "p"}})
    server.forget()
    with pytest.raises(GoneError):
        list(cluster.watch(PODS, version="0"))


def test_logs(cluster: Cluster, server: ApiServer) -> None:
    server.put("pods", {"metadata": {"name": "p"}, "status": {"phase": "Running"}})
    server.logs["p", "node"] = ["2026-01-01T00:00:00Z one", "2026-01-01T00:00:01Z two"]
    assert list(cluster.log("p", "node")) == server.logs["p", "node"]
    assert list(cluster.log("p", "node", since="2026-01-01T00:00:01Z")) == ["2026-01-01T00:00:01Z two"]
    with pytest.raises(ApiError, match="waiting to start"):
        list(cluster.log("p", "other"))
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(cluster.log("p", "node", follow=True)))
    reader.start()
    until(lambda: len(server.requests) == 4)
    server.logs["p", "node"].append("2026-01-01T00:00:02Z three")
    server.change("pods", "p", status={"phase": "Succeeded"})
    reader.join(10)
    assert [line.split(" ")[1] for line in found] == ["one", "two", "three"]
