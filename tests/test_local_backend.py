"""The local backend with real processes: order, environment, nodes, failures, stopping, and what survives what."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs_kit import Manifest, alive, python, tiny_job, tiny_runtime, until

from blueprints.backends.local import LocalBackend
from blueprints.backends.processes import reserve_port
from blueprints.errors import EnvironmentFault, ManifestError, UsageError

ROOT = Path(__file__).resolve().parents[1]
WAIT = 90.0
"""Seconds a test waits for a job on a busy machine."""
PATIENT = """
    import os, pathlib, signal, sys, time
    workspace = pathlib.Path(os.environ["BLUEPRINTS_WORKSPACE"])
    count = workspace / "count"
    def save(*_):
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    while (done := int(count.read_text()) if count.exists() else 0) < int(os.environ.get("STEPS", "1000000")):
        count.write_text(str(done + 1))
        print("step", done + 1, flush=True)
        time.sleep(0.05)
"""


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    """A backend whose jobs are gone when the test has ended."""
    backend = LocalBackend(tmp_path / "home of jobs")
    yield backend
    for name in backend.names():
        backend.delete(name, force=True)


def step(backend: LocalBackend, name: str, step_name: str) -> object:
    """The status of one step."""
    return next(found for found in backend.get(name).steps if found.name == step_name)


def printed(backend: LocalBackend, name: str, step_name: str = "node-0") -> list[str]:
    """What a step printed."""
    return [line for _, line in backend.logs(name, [step_name])]


def test_steps_run_in_the_order_of_their_dependencies_and_share_the_workspace(backend: LocalBackend) -> None:
    say = "import sys, time; p = open('/workspace/order', 'a'); time.sleep(0.2); p.write({!r} + '\\n')"
    runtime = tiny_runtime(
        ["sh", "-c", "cat '/workspace/order'; echo node"],
        model=["python", "-c", say.format("model")],
        dataset=["python", "-c", say.format("dataset")],
    )
    assert backend.start(tiny_job(), runtime) == "started"
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.state, status.exit_code) == ("Complete", 0)
    assert printed(backend, "tiny") == ["model", "dataset", "node"]
    assert [found.name for found in status.steps] == ["model-initializer", "dataset-initializer", "node-0"]
    assert all(found.status == "Succeeded" for found in status.steps)


def test_functions_of_ones_own_are_found_where_the_job_was_started_from(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "more").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), "more"]))
    (tmp_path / "here" / "rewards_here.py").write_text("def polite(**_):\n    return 'polite'\n")
    (tmp_path / "here" / "more" / "rewards_more.py").write_text("def kind(**_):\n    return 'kind'\n")
    (tmp_path / "here" / "yaml.py").write_text("raise SystemExit('hides the library')\n")
    look = """
        import yaml
        from trainers.functions import load_function
        print([load_function(name, where="here")() for name in ("rewards_here:polite", "rewards_more:kind")])
    """
    backend.start(tiny_job("where-1"), tiny_runtime(python(look)))
    assert backend.wait("where-1", timeout=WAIT).state == "Complete"
    assert printed(backend, "where-1")[-1] == "['polite', 'kind']"


def test_environment_is_the_pods_and_not_the_callers(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LORA_CONFIG": '{"r": 99}', "PET_NNODES": "7", "BLUEPRINTS_RECIPE": "other", "STORAGE_URI": "hf://a/b",
        "RANK": "3", "HF_TOKEN": "hf_secret", "MY_KEY": "from-secret",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    dump = python("import json, os, sys; print(json.dumps([dict(os.environ), sys.executable, os.getcwd()]))")
    runtime = tiny_runtime(dump, dataset=dump)
    key = {"secretKeyRef": {"name": "s", "key": "MY_KEY"}}
    job = tiny_job(
        trainer={
            "env": [
                {"name": "OUT", "value": "/workspace/output"},
                {"name": "TWICE", "value": "$(OUT):$(NOPE):$$(OUT)"},
                {"name": "FROM_SECRET", "valueFrom": key},
            ]
        },
        initializer={"dataset": {"storageUri": "builtin://rows", "env": [{"name": "REVISION", "value": "main"}]}},
    )
    backend.start(job, runtime)
    assert backend.wait("tiny", timeout=WAIT).state == "Complete"
    workspace = str(backend.directory("tiny").workspace)

    env, executable, cwd = json.loads(printed(backend, "tiny", "dataset-initializer")[0])
    assert (env["STORAGE_URI"], env["REVISION"]) == ("builtin://rows", "main")
    assert "PET_NNODES" not in env

    env, executable, cwd = json.loads(printed(backend, "tiny")[0])
    assert executable == sys.executable
    assert cwd == workspace == env["BLUEPRINTS_WORKSPACE"]
    assert env["OUT"] == f"{workspace}/output"
    assert env["TWICE"] == f"{workspace}/output:$(NOPE):$(OUT)"
    assert env["FROM_SECRET"] == "from-secret"
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"], env["PET_NODE_RANK"]) == ("1", "1", "0")
    assert env["PET_MASTER_ADDR"] == "127.0.0.1"
    assert env["PET_MASTER_PORT"].isdigit()
    assert env["HF_TOKEN"] == "hf_secret"
    assert not {"LORA_CONFIG", "BLUEPRINTS_RECIPE", "STORAGE_URI", "RANK"} & set(env)


def test_steps_see_the_gpus_they_ask_for(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    show = python("import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    gpu = {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 1}}}
    backend.start(tiny_job("two", nodes=2, trainer=gpu), tiny_runtime(show, dataset=show))
    backend.start(tiny_job("four", nodes=4, trainer=gpu), tiny_runtime(show))
    assert backend.wait("two", timeout=WAIT).notes == []
    assert printed(backend, "two", "dataset-initializer") == ["''"]  # it asks for none
    assert [printed(backend, "two", node) for node in ("node-0", "node-1")] == [["'3'"], ["'5'"]]
    assert backend.wait("four", timeout=WAIT).notes == [
        "the recipe asks for 4 GPU(s), this machine shows 3: set resources.gpu to match"
    ]


def test_a_local_path_of_the_user_is_not_mistaken_for_the_workspace(backend: LocalBackend) -> None:
    job = tiny_job(trainer={"args": ["file:///workspace/rows.jsonl", "a=/workspace/x", "/workspaces/y"]})
    backend.start(job, tiny_runtime(["echo"]))
    backend.wait("tiny", timeout=WAIT)
    workspace = backend.directory("tiny").workspace
    assert printed(backend, "tiny") == [f"file:///workspace/rows.jsonl a={workspace}/x /workspaces/y"]


def test_a_recipe_that_speaks_of_the_workspace_reaches_every_step_unchanged(backend: LocalBackend) -> None:
    said = "model.chat_template=in /workspace"
    show = python("import os, sys; print(sys.argv[1:], os.environ['BLUEPRINTS_OVERRIDES'])")
    env = [{"name": "BLUEPRINTS_OVERRIDES", "value": f'["{said}"]'}]
    backend.start(tiny_job(trainer={"args": [said], "env": env}), tiny_runtime(show))
    backend.wait("tiny", timeout=WAIT)
    assert printed(backend, "tiny") == [f"['{said}'] [\"{said}\"]"]


def test_logs_are_utf8_whatever_the_callers_terminal(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("LC_ALL", "C")
    backend.start(tiny_job(), tiny_runtime(python("print('⟦é⟧')")))
    assert backend.wait("tiny", timeout=WAIT).exit_code == 0
    assert printed(backend, "tiny") == ["⟦é⟧"]


def test_missing_gpus_are_not_waited_for(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resources = {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 1}}}
    backend.start(tiny_job(trainer=resources), tiny_runtime(python("raise SystemExit(5)"), backoff=3))
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.exit_code, status.steps[0].attempts) == (5, 1)


def test_two_nodes_reduce_together_over_loopback(backend: LocalBackend, tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            value = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(value)
            print("world", dist.get_world_size(), "sum", value.item(), flush=True)
            dist.barrier()
            dist.destroy_process_group()
            """
        )
    )
    backend.start(tiny_job("a", nodes=2), tiny_runtime(["torchrun", str(script)]))
    backend.start(tiny_job("b", nodes=2), tiny_runtime(["torchrun", str(script)]))  # side by side
    for name in ("a", "b"):
        assert backend.wait(name, timeout=WAIT).state == "Complete", printed(backend, name)
        for node in ("node-0", "node-1"):
            assert "world 2 sum 3.0" in printed(backend, name, node)


def test_jobs_side_by_side_never_share_a_port(backend: LocalBackend) -> None:
    show = python("import os, time; print(os.environ['PET_MASTER_PORT'], flush=True); time.sleep(1)")
    for name in ("a", "b", "c"):
        backend.start(tiny_job(name), tiny_runtime(show))
    for name in ("a", "b", "c"):
        assert backend.wait(name, timeout=WAIT).state == "Complete"
    assert len({printed(backend, name)[0] for name in ("a", "b", "c")}) == 3


@pytest.mark.parametrize(("code", "result"), [(2, 2), (3, 3), (5, 5), (1, 4), (7, 4)])
def test_exit_code_of_a_step_decides_the_jobs(backend: LocalBackend, code: int, result: int) -> None:
    fail = python(f"""
        import os, sys
        from blueprints.errors import BlueprintError
        from blueprints.termination import write_termination
        write_termination(BlueprintError("rows are bad", where="rows.jsonl:3", todo="mend them"))
        sys.exit({code})
    """)
    backend.start(tiny_job(), tiny_runtime(python("print('never')"), dataset=fail))
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.state, status.reason, status.exit_code) == ("Failed", "StepFailed", result)
    assert (status.failed_step, status.message) == ("dataset-initializer", "step dataset-initializer: rows are bad")
    assert status.todo == "mend them"
    assert [found.status for found in status.steps] == ["Failed", "Pending"]


def test_users_faults_fail_at_once_and_others_are_tried_again(backend: LocalBackend) -> None:
    fails_twice = python("""
        import os, pathlib, sys
        tries = pathlib.Path(os.environ["BLUEPRINTS_WORKSPACE"], "tries")
        count = int(tries.read_text()) + 1 if tries.exists() else 1
        tries.write_text(str(count))
        print("try", count)
        sys.exit(0 if count == 3 else 1)
    """)
    backend.start(tiny_job("again"), tiny_runtime(fails_twice, backoff=3))
    backend.start(tiny_job("once"), tiny_runtime(python("raise SystemExit(2)"), backoff=3))
    once = backend.wait("once", timeout=WAIT)
    assert (once.state, once.steps[0].attempts) == ("Failed", 1)
    again = backend.wait("again", timeout=WAIT)
    assert (again.state, again.steps[0].attempts) == ("Complete", 3)
    assert [line for line in printed(backend, "again") if line.startswith("try")] == ["try 1", "try 2", "try 3"]


def test_without_a_message_the_end_of_the_log_tells_why(backend: LocalBackend) -> None:
    backend.start(tiny_job(), tiny_runtime(python("raise ValueError('no such layer')")))
    cause = backend.wait("tiny", timeout=WAIT).steps[0].failure
    assert cause is not None
    assert cause["problem"] == "ended with exit code 1"
    assert "ValueError: no such layer" in cause["log"]


def test_first_failure_is_reported_and_nodes_that_hang_are_stopped(backend: LocalBackend) -> None:
    node = python("""
        import os, signal, sys, time
        if os.environ["PET_NODE_RANK"] == "1":
            time.sleep(0.5)
            from blueprints.errors import DataError
            from blueprints.termination import write_termination
            write_termination(DataError("the loss is NaN"))
            sys.exit(3)
        time.sleep(600)
    """)
    backend.start(tiny_job(nodes=2), tiny_runtime(node))
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.failed_step, status.exit_code) == ("node-1", 3)
    assert status.message == "step node-1: the loss is NaN"
    assert {found.status for found in status.steps} == {"Failed"}


def test_stopped_job_keeps_its_workspace_and_goes_on(backend: LocalBackend) -> None:
    runtime = tiny_runtime(python(PATIENT))
    job = tiny_job(trainer={"env": [{"name": "STEPS", "value": "40"}]})
    backend.start(job, runtime, resume="blueprints train x --name tiny")
    until(lambda: len(printed(backend, "tiny")) > 3)
    with pytest.raises(UsageError, match="is running"):
        backend.start(job, runtime)
    with pytest.raises(UsageError, match="is running"):
        backend.delete("tiny")
    backend.stop("tiny")
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.state, status.reason, status.steps[0].exit_code) == ("Failed", "Stopped", 143)
    assert "blueprints train x --name tiny" in status.todo
    count = int((backend.directory("tiny").workspace / "count").read_text())

    with pytest.raises(UsageError, match="another recipe"):
        backend.start(tiny_job(), runtime)
    assert backend.start(job, runtime) == "resumed"
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.state, status.runs) == ("Complete", 2)
    assert f"step {count + 1}" in printed(backend, "tiny")
    assert printed(backend, "tiny").count("step 1") == 1
    assert backend.start(job, runtime) == "complete"
    assert backend.get("tiny").runs == 2


def test_kill_ends_a_step_that_ignores_the_request(backend: LocalBackend) -> None:
    stubborn = python("""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    backend.start(tiny_job(), tiny_runtime(stubborn, grace=600))
    child = int(until(lambda: printed(backend, "tiny"))[0])
    backend.stop("tiny")
    with pytest.raises(TimeoutError):
        backend.wait("tiny", timeout=1)
    backend.stop("tiny", kill=True)
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.state, status.reason, status.steps[0].exit_code) == ("Failed", "Stopped", 137)
    assert not alive(child)


def test_grace_period_ends_a_step_that_ignores_the_request(backend: LocalBackend) -> None:
    stubborn = python("""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("here", flush=True)
        time.sleep(600)
    """)
    backend.start(tiny_job(), tiny_runtime(stubborn, grace=1))
    until(lambda: printed(backend, "tiny"))
    backend.stop("tiny")
    assert backend.wait("tiny", timeout=WAIT).steps[0].exit_code == 137


def test_deadline_stops_the_job(backend: LocalBackend) -> None:
    backend.start(tiny_job(activeDeadlineSeconds=1), tiny_runtime(python(PATIENT)))
    status = backend.wait("tiny", timeout=WAIT)
    assert (status.state, status.reason, status.exit_code) == ("Failed", "DeadlineExceeded", 4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_supervisor_is_noticed_and_its_steps_do_not_run_beside_the_resumed_job(backend: LocalBackend) -> None:
    stubborn = python("""
        import os, pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        again = pathlib.Path(os.environ["BLUEPRINTS_WORKSPACE"], "again")
        if again.exists():
            sys.exit(0)
        again.touch()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        time.sleep(600)
    """)
    runtime, job = tiny_runtime(stubborn), tiny_job()
    backend.start(job, runtime, resume="blueprints train x --name tiny")
    orphans = [int(pid) for pid in until(lambda: printed(backend, "tiny"))[0].split()]
    directory = backend.directory("tiny")
    os.kill(int((directory.path / "supervisor.pid").read_text()), signal.SIGKILL)
    until(lambda: not directory.is_owned())
    status = backend.get("tiny")
    assert (status.state, status.reason, status.exit_code) == ("Failed", "SupervisorLost", 4)
    assert "blueprints train x --name tiny" in status.todo
    assert all(alive(pid) for pid in orphans)

    assert backend.start(job, runtime) == "resumed"
    assert not any(alive(pid) for pid in orphans)
    assert backend.wait("tiny", timeout=WAIT).state == "Complete"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells the steps")
def test_step_is_told_when_its_supervisor_is_killed(backend: LocalBackend) -> None:
    backend.start(tiny_job(), tiny_runtime(python(PATIENT)))
    until(lambda: printed(backend, "tiny"))
    pid = backend.get("tiny").steps[0].pid
    assert pid is not None
    os.kill(int((backend.directory("tiny").path / "supervisor.pid").read_text()), signal.SIGKILL)
    until(lambda: not alive(pid))


def test_job_outlives_the_process_that_started_it(backend: LocalBackend) -> None:
    job, runtime = tiny_job(trainer={"env": [{"name": "STEPS", "value": "20"}]}), tiny_runtime(python(PATIENT))
    code = f"""
import os, pathlib, signal
from blueprints.backends.local import LocalBackend
LocalBackend(pathlib.Path({str(backend.home)!r})).start({job!r}, {runtime!r})
os.killpg(0, signal.SIGKILL)  # as a closing terminal does, but harder
"""
    subprocess.run([sys.executable, "-c", code], start_new_session=True, check=False, timeout=60)
    assert backend.wait("tiny", timeout=WAIT).state == "Complete"


def test_deleted_job_leaves_nothing(backend: LocalBackend) -> None:
    backend.start(tiny_job(), tiny_runtime(python(PATIENT)))
    until(lambda: printed(backend, "tiny"))
    pid = backend.get("tiny").steps[0].pid
    assert pid is not None
    backend.delete("tiny", force=True)
    assert not alive(pid)
    assert list(backend.jobs_directory.iterdir()) == []
    with pytest.raises(UsageError, match="no job named 'tiny'"):
        backend.get("tiny")


def test_unknown_names_come_with_near_ones(backend: LocalBackend) -> None:
    backend.start(tiny_job("orders-1"), tiny_runtime(["true"]))
    with pytest.raises(UsageError, match="orders-1"):
        backend.get("order-1")
    for name in ("../jobs/orders-1", "", ".", "x" * 300, "a\0b"):
        with pytest.raises(UsageError, match="no job"):
            backend.get(name)
    with pytest.raises(UsageError, match="its steps are node-0"):
        backend.logs("orders-1", ["node-7"])


def test_program_that_is_missing_is_the_environments_fault(backend: LocalBackend) -> None:
    backend.start(tiny_job(), tiny_runtime(["no-such-program"], backoff=3))
    status = backend.wait("tiny", timeout=WAIT)
    assert status.exit_code == 5
    assert "cannot start 'no-such-program'" in status.message


def test_sidecars_are_refused_before_anything_starts(backend: LocalBackend) -> None:
    runtime = tiny_runtime(["true"])
    pod: Manifest = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"].append({"name": "sidecar", "image": "x"})
    with pytest.raises(UsageError, match="node, sidecar"):
        backend.start(tiny_job(), runtime)
    with pytest.raises(ManifestError, match="at most 48 characters"):
        backend.start(tiny_job("x" * 49), tiny_runtime(["true"]))
    assert backend.names() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_forbidden_home_is_one_clear_error(tmp_path: Path) -> None:
    home = tmp_path / "locked"
    home.mkdir(mode=0o500)
    with pytest.raises(EnvironmentFault, match="BLUEPRINTS_HOME"):
        LocalBackend(home).start(tiny_job(), tiny_runtime(["true"]))


def test_home_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="BLUEPRINTS_HOME"):
        LocalBackend(tmp_path / "file").start(tiny_job(), tiny_runtime(["true"]))


def test_home_that_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for home in (tmp_path / "loop", tmp_path / ("long" * 100), Path("/proc/no-such")):
        with pytest.raises(EnvironmentFault, match="BLUEPRINTS_HOME"):
            LocalBackend(home).start(tiny_job(), tiny_runtime(["true"]))


def test_no_free_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(EnvironmentFault, match="no free TCP port"):
            reserve_port(tmp_path, [taken.getsockname()[1]])


def test_reserved_port_is_given_to_one(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    port = reserve_port(tmp_path, [number])
    with pytest.raises(EnvironmentFault):
        reserve_port(tmp_path, [number])
    port.release()
    reserve_port(tmp_path, [number]).release()


def test_events_tell_the_story(backend: LocalBackend) -> None:
    backend.start(tiny_job(), tiny_runtime(["true"]))
    backend.wait("tiny", timeout=WAIT)
    reasons = [(event["kind"], event["reason"]) for event in backend.directory("tiny").events()]
    assert reasons[:3] == [("Job", "Created"), ("Job", "Started"), ("Step", "Started")]
    assert ("Step", "Succeeded") in reasons
