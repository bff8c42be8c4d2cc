"""`CustomTrainer(func=...)`: what travels, what is refused, and real runs on this machine."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jobs_kit import until

from blueprints import CustomTrainer, CustomTrainerContainer, Initializer, TrainerClient
from blueprints.client import WaitFailedError
from blueprints.custom_trainer import custom_job, custom_name, set_words
from blueprints.custom_trainer.source import literal, script_of
from blueprints.errors import BlueprintError, UsageError
from blueprints.jobset import build_job_set
from blueprints.manifests import check_train_job
from blueprints.runtimes import get_runtime
from blueprints.types import ActiveDeadlineSeconds, Labels, Name, TrainerArgs, TrainerCommand

OUTSIDE = 3
DIRECT = "jax-distributed"
"""A runtime whose nodes run plain Python: no torch to wait for."""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerClient]:
    monkeypatch.setenv("BLUEPRINTS_HOME", str(tmp_path / "home"))
    client = TrainerClient()
    yield client
    for job in client.list_jobs():
        client.delete_job(job.name)


def log(client: TrainerClient, name: str, step: str = "node-0") -> str:
    return "\n".join(client.get_job_logs(name, step))


def wheel(folder: Path, name: str, code: str, version: str = "1.0") -> Path:
    """A wheel with one module."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


# What travels --------------------------------------------------------------------------------------------------------


def plain(rate: float, names: list[str], *, deep: dict[str, Any] | None = None) -> None:
    """A function with strings that a shell or Kubernetes would change."""
    print(f"rate={rate} names={names} deep={deep} $(PET_NNODES) $$HOME `date` \\n")


def run_script(script: str, folder: Path) -> str:
    """What the script prints when it is run as the function's file, without the launcher."""
    (folder / "blueprints_function.py").write_text("def run_function(f, a): f(**a)\n")
    (folder / "function.py").write_text(script)
    return subprocess.run(
        [sys.executable, "function.py"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def test_the_script_is_a_file_that_calls_the_function(tmp_path: Path) -> None:
    script = script_of(plain, {"rate": 0.1, "names": ["a", 'b"'], "deep": {"x": (1, None)}})
    assert (
        run_script(script, tmp_path)
        == "rate=0.1 names=['a', 'b\"'] deep={'x': (1, None)} $(PET_NNODES) $$HOME `date` \\n\n"
    )


def test_an_inner_function_keeps_its_strings(tmp_path: Path) -> None:
    def inner() -> None:
        text = """first
    second"""
        print(repr(text))

    assert run_script(script_of(inner, None), tmp_path) == "'first\\n    second'\n"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(PLAIN)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    again = eval(literal(value, "here"))
    assert repr(again) == repr(value)
    assert type(again) is type(value)


def test_sets_and_odd_numbers() -> None:
    assert eval(literal({1, 2}, "")) == {1, 2}
    assert eval(literal(frozenset(), "")) == frozenset()
    assert math.isinf(eval(literal(-math.inf, "")))


class Some:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...

    def __call__(self) -> None: ...


def uses_module() -> None:
    print(math.pi)


def uses_in_default(x: int = OUTSIDE) -> None:
    print(x)


def uses_in_nested() -> None:
    def inner() -> int:
        return OUTSIDE

    inner()


@functools.cache
def decorated() -> None: ...


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


def closure() -> Any:
    captured = 1

    def inner() -> None:
        print(captured)

    return inner


def made_by_exec() -> Any:
    space: dict[str, Any] = {}
    exec("def typed(): pass", space)
    return space["typed"]


REFUSED = [
    (lambda: None, "a lambda has no source"), (closure(), "uses captured of the function around it"),
    (print, "is not written in Python as a function"), (math.sqrt, "is not written in Python"),
    (Some().method, "is a method: its object does not travel"), (Some.method, "is defined in a class"),
    (Some, "is not a function"), (Some(), "is not written in Python as a function"), (Some.static, "is defined in a class"),
    (functools.partial(plain, rate=1), "a partial function has no source"), (3, "3 is not a function"),
    (uses_module, "uses math from outside"), (uses_in_default, "uses OUTSIDE from outside"),
    (uses_in_nested, "uses OUTSIDE from outside"), (decorated, "is not written in Python"), (coroutine, "would not run it"),
    (generator, "would not run it"), (made_by_exec(), "the source of typed() cannot be found"),
]  # fmt: skip


@pytest.mark.parametrize(("func", "said"), REFUSED)
def test_what_cannot_travel_is_refused(func: Any, said: str) -> None:
    with pytest.raises(UsageError, match=r"CustomTrainer\(func=") as raised:
        script_of(func, None)
    assert said in str(raised.value)
    assert raised.value.todo


def uses_names_of_its_own() -> None:
    global made_here
    made_here = 1

    class Inner:
        size = 2
        double = size * 2

    print(made_here, Inner.double, [size * 2 for size in range(3)], __name__, uses_names_of_its_own)


def test_names_of_its_own_are_no_fault() -> None:
    assert "made_here" in script_of(uses_names_of_its_own, None)


ARGUMENTS = [
    ({}, "missing a required argument: 'rate'"), ({"rate": 1, "names": [], "speed": 1}, "unexpected keyword argument 'speed'"),
    ({"rate": Path("x"), "names": []}, "['rate']"), ({"rate": 1, "names": [1, object()]}, "['names'][1]"),
    ({"rate": OUTSIDE, "names": [type]}, "is not plain data"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), ARGUMENTS)
def test_arguments_that_cannot_travel_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=r"CustomTrainer\(func_args=") as raised:
        script_of(plain, arguments)
    assert said in str(raised.value)


def nothing() -> None: ...


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"num_nodes": 0}, "num_nodes"), ({"num_nodes": True}, "num_nodes"), ({"env": {"A": 1}}, 'write "1"'),
    ({"packages_to_install": "torch"}, "give a list of strings"), ({"packages_to_install": ["-r x.txt"]}, "option of pip"),
    ({"pip_index_urls": ["https://me:secret@index/simple"]}, "would be readable"), ({"resources_per_node": [1]}, "a dictionary"),
    ({"resources_per_node": {"gpu": 1, "nvidia.com/gpu": 2}}, "given twice"), ({"func_args": [1]}, "dictionary of arguments"),
    ({"packages_to_install": ["git+https://tok@github.com/x/y"]}, "would be readable"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), FIELDS)
def test_wrong_fields_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        custom_job(CustomTrainer(func=nothing, **fields), get_runtime("torch-distributed"), name="x")
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)


RESOURCES = [
    ({"gpu": 4, "cpu": 8, "memory": "64Gi"}, {"nvidia.com/gpu": 4, "cpu": 8, "memory": "64Gi"}, None, "auto"),
    ({"GPU": 1}, {"nvidia.com/gpu": 1}, None, "auto"), ({"cpu": 1.5}, {"cpu": "1.5"}, None, "2"),
    ({"mig-1g.5gb": 1}, {"nvidia.com/mig-1g.5gb": 1}, 1, "1"), ({"google.com/tpu": 4}, {"google.com/tpu": 4}, 4, "4"), (None, None, None, "1"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "limits", "processes", "env"), RESOURCES)
def test_the_train_job(given: Any, limits: Any, processes: int | None, env: str) -> None:
    trainer = CustomTrainer(
        func=plain, func_args={"rate": 1.0, "names": []}, image="my/image:1", num_nodes=3, resources_per_node=given,
        env={"A": "$(B)"}, packages_to_install=["six>=1"], pip_index_urls=["https://a/simple", "https://b/simple"],
    )  # fmt: skip
    runtime = get_runtime("torch-distributed")
    job = custom_job(trainer, runtime, name="fit")
    assert check_train_job(job, runtime) == []
    assert job["spec"]["trainer"].get("numProcPerNode") == processes
    node = build_job_set(job, runtime)["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = node["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (node["parallelism"], container["image"], variables["PET_NPROC_PER_NODE"]) == (3, "my/image:1", env)
    assert variables["A"] == "$$(B)"  # as Kubernetes hands it on: $(B)
    assert container.get("resources", {}).get("limits") == limits
    assert container["args"][2:] == [
        "--file", "function_plain.py", "--package", "six>=1", "--index-url", "https://a/simple", "--index-url", "https://b/simple",
    ]  # fmt: skip
    assert "$$(PET_NNODES)" in container["args"][1]


def test_other_policies_start_it_in_their_way() -> None:
    mpi = custom_job(CustomTrainer(func=nothing), get_runtime("deepspeed-distributed"), name="x")["spec"]["trainer"]
    assert mpi["command"][:3] == ["mpirun", "python", "-c"]
    assert mpi["args"][-2:] == ["--launcher", "python"]


def test_a_runtime_with_initializers_is_refused() -> None:
    with pytest.raises(UsageError, match="model-initializer and dataset-initializer"):
        custom_job(CustomTrainer(func=nothing), get_runtime("llm-sft"), name="x")


def test_names_are_made_of_the_function() -> None:
    runtime = get_runtime("torch-distributed")
    assert custom_name(CustomTrainer(func=test_names_are_made_of_the_function), runtime).startswith(
        "test-names-are-made-of"
    )
    assert custom_name(CustomTrainerContainer(image="reg.io:5000/team/fit:1"), runtime).startswith("fit-")


def test_an_image_needs_a_cluster(client: TrainerClient) -> None:
    with pytest.raises(UsageError, match="an image needs a cluster"):
        client.train(trainer=CustomTrainerContainer(image="x"))
    with pytest.raises(UsageError, match="without initializers"):
        client.train(trainer=CustomTrainer(func=nothing), initializer=Initializer(dataset="builtin://orders"))
    assert client.list_jobs() == []


def test_an_image_with_a_command_of_its_own() -> None:
    runtime = get_runtime("torch-distributed")
    job = custom_job(CustomTrainerContainer(image="reg/x:1", num_nodes=2, env={"A": "1"}), runtime, name="x")
    assert "command" not in job["spec"]["trainer"]
    set_words(TrainerCommand(["torchrun", "t.py"]), job)
    set_words(TrainerArgs(["--lr", "1"]), job)
    assert check_train_job(job, runtime) == []
    container = build_job_set(job, runtime)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert (container["image"], container["command"], container["args"]) == (
        "reg/x:1",
        ["torchrun", "t.py"],
        ["--lr", "1"],
    )
    with pytest.raises(UsageError, match="list of strings"):
        set_words(TrainerCommand("torchrun"), job)  # type: ignore[arg-type] - the mistake of a user


def test_a_function_brings_its_own_command(client: TrainerClient) -> None:
    with pytest.raises(UsageError, match="bring their own command"):
        client.train(trainer=CustomTrainer(func=nothing), options=[TrainerArgs(["x"])])
    with pytest.raises(UsageError, match="bring their own command"):
        client.train(
            runtime="llm-sft",
            initializer=Initializer("builtin://orders", "builtin://tiny-llama"),
            options=[TrainerCommand(["x"])],
        )


# On this machine -----------------------------------------------------------------------------------------------------


def reduce(start: float, greeting: str) -> None:
    import os
    from pathlib import Path

    import greetings
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    total = torch.tensor([start + distributed.get_rank()])
    distributed.all_reduce(total)
    seen = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HOME", "MINE")}
    print(greetings.greet(greeting), total.item(), seen, Path("/workspace").name, flush=True)
    distributed.destroy_process_group()


def test_two_nodes_with_a_package_of_their_own(
    client: TrainerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "greetings", "def greet(name): return f'hello {name}'\n")
    monkeypatch.chdir(tmp_path)
    trainer = CustomTrainer(
        func=reduce, func_args={"start": 10.0, "greeting": "you"}, num_nodes=2, env={"MINE": "yes"},
        packages_to_install=["./greetings-1.0-py3-none-any.whl"],
    )  # fmt: skip
    name = client.train(trainer=trainer, options=[Labels({"team": "a"}), ActiveDeadlineSeconds(300)])
    job = client.wait_for_job_status(name, timeout=300)
    assert [step.name for step in job.steps] == ["node-0", "node-1"]
    for rank in (0, 1):
        text = log(client, name, f"node-{rank}")
        assert "hello you 21.0" in text
        assert (
            f"'RANK': '{rank}', 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'HOME': '{os.environ['HOME']}', 'MINE': 'yes'"
            in text
        )
    assert subprocess.run([sys.executable, "-c", "import greetings"], capture_output=True, check=False).returncode == 1
    stored = yaml.safe_load((client.backend.directory(name).path / "trainjob.yaml").read_text())
    assert stored["metadata"]["labels"]["team"] == "a"


def fails_on_one_node() -> None:
    import os
    import time

    if os.environ["RANK"] == "1":
        raise ValueError("the learning rate is a banana")
    time.sleep(600)


def test_what_the_function_raises_is_the_failure(client: TrainerClient) -> None:
    name = client.train(trainer=CustomTrainer(func=fails_on_one_node, num_nodes=2), options=[Name("bad")])
    with pytest.raises(WaitFailedError, match="step node-1: ValueError: the learning rate is a banana"):
        client.wait_for_job_status(name, timeout=300)
    status = client.backend.get("bad")
    assert {step.name: step.exit_code for step in status.steps}["node-1"] == 4
    assert status.steps[1].attempts == 1  # the function would fail again
    assert log(client, "bad", "node-1").endswith("error: ValueError: the learning rate is a banana")
    assert 'of fails_on_one_node(): raise ValueError("the learning rate is a banana")' in log(client, "bad", "node-1")


def leaves_with(code: Any) -> None:
    import sys

    print("leaving", flush=True)
    sys.exit(code)


@pytest.mark.parametrize(
    ("code", "exit_code", "problem"), [(3, 3, "ended with exit code 3"), ("no rows", 4, "no rows")]
)
def test_exit_codes(client: TrainerClient, code: Any, exit_code: int, problem: str) -> None:
    name = client.train(runtime=DIRECT, trainer=CustomTrainer(func=leaves_with, func_args={"code": code}))
    status = until(lambda: (s := client.backend.get(name)).finished and s)
    assert (status.state, status.steps[0].exit_code) == ("Failed", exit_code)
    assert problem in status.message
    assert "leaving" in log(client, name)


def waits(file: str) -> None:
    import signal
    import sys
    import time
    from pathlib import Path

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Path(file).write_text("here")
    time.sleep(600)


def test_a_stopped_function_never_looks_complete(client: TrainerClient, tmp_path: Path) -> None:
    name = client.train(runtime=DIRECT, trainer=CustomTrainer(func=waits, func_args={"file": str(tmp_path / "here")}))
    until((tmp_path / "here").exists)
    client.backend.stop(name)
    status = until(lambda: (s := client.backend.get(name)).finished and s)
    assert (status.state, status.reason, status.steps[0].exit_code) == ("Failed", "Stopped", 143)


def test_packages_that_cannot_be_installed(client: TrainerClient, tmp_path: Path) -> None:
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_text("no wheel")
    name = client.train(runtime=DIRECT, trainer=CustomTrainer(func=nothing, packages_to_install=[str(broken)]))
    status = until(lambda: (s := client.backend.get(name)).finished and s)
    assert (status.exit_code, status.steps[0].exit_code) == (2, 2)
    assert "the packages could not be installed" in status.message


def test_another_version_than_the_installed_one_leaves_that_alone(client: TrainerClient, tmp_path: Path) -> None:
    def shows_version() -> None:
        import six

        print("six", six.__version__, flush=True)

    six = wheel(tmp_path, "six", "__version__ = 'ours'\n", version="99.0")
    before = subprocess.run(
        [sys.executable, "-c", "import six; print(six.__version__)"], capture_output=True, text=True, check=True
    )
    name = client.train(runtime=DIRECT, trainer=CustomTrainer(func=shows_version, packages_to_install=[str(six)]))
    client.wait_for_job_status(name, timeout=120)
    assert "six ours" in log(client, name)
    after = subprocess.run(
        [sys.executable, "-c", "import six; print(six.__version__)"], capture_output=True, text=True, check=True
    )
    assert before.stdout == after.stdout != "ours\n"


def test_the_first_part_runs_on_its_own(tmp_path: Path) -> None:
    """As in a container: no llm-blueprints, the termination log in a file, a signal that kills."""

    def dies() -> None:
        import os

        os.kill(os.getpid(), 9)

    trainer = custom_job(CustomTrainer(func=dies), get_runtime(DIRECT), name="x")["spec"]["trainer"]
    cause = tmp_path / "cause"
    cause.touch()
    result = subprocess.run(
        [sys.executable, "-I", *trainer["command"][1:], *trainer["args"]], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "BLUEPRINTS_TERMINATION_LOG": str(cause)}, check=False,
    )  # fmt: skip
    assert result.returncode == 128 + signal.SIGKILL
    assert "killed by a signal" in json.loads(cause.read_text())["problem"]


def test_runtimes_say_which_trainer_they_are_for(client: TrainerClient) -> None:
    types = {
        name: client.get_runtime(name).trainer.trainer_type for name in ("llm-sft", "llm-custom", "torch-distributed")
    }
    assert types == {"llm-sft": "BuiltinTrainer", "llm-custom": "BuiltinTrainer", "torch-distributed": "CustomTrainer"}


def test_errors_are_ours(client: TrainerClient) -> None:
    with pytest.raises(BlueprintError):
        client.train(trainer=CustomTrainer(func=nothing, num_nodes=2), runtime="no-such-runtime")
    with pytest.raises(BlueprintError):
        client.train(trainer=CustomTrainer(func=nothing), options=[Name("Bad Name")])
