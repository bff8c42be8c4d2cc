"""What a Pod gives a container, for a process of this machine: environment, ports, and an end for all it started."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

from blueprints.backends.state import JobDirectory
from blueprints.errors import EnvironmentFault
from blueprints.progress import CALLED_FROM
from blueprints.quantity import parse_quantity
from blueprints.resolve import EnvVar, Step

WORKSPACE = "/workspace"
JOB_MARKER, STEP_MARKER = "BLUEPRINTS_SUPERVISED_JOB", "BLUEPRINTS_SUPERVISED_STEP"
"""Variables whose values name a job's or a step's processes: what inherited them belongs to it."""
_NOT_INHERITED = re.compile(
    r"^(PET_.*|BLUEPRINTS_.*|TORCHELASTIC_.*|KUBEFLOW_TRAINER_.*|LORA_CONFIG|STORAGE_URI|IGNORE_PATTERNS|REVISION"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT)$"
)
"""Variables that configure a step: those of the caller's own environment must not leak into the job."""
_WORKSPACE_PATH = re.compile(r"(?<![\w/.~-])/workspace(?![\w.-])")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
"""The beginning of an argument `key=value`."""
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_COMPLETION_INDEX = re.compile(r"^metadata\.(annotations|labels)\['batch\.kubernetes\.io/job-completion-index'\]$")


def cores() -> int:
    """CPU cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command_line(step: Step, directory: JobDirectory, environment: Mapping[str, str]) -> list[str]:
    """Command and arguments with `$(VARIABLES)` expanded and `/workspace` replaced by the job's directory."""
    return [_local_path(_expand(part, environment), step, directory) for part in step.argv]


def step_environment(
    step: Step, directory: JobDirectory, base: Mapping[str, str], *, port: int, nodes: int
) -> dict[str, str]:
    """The environment of a step's process: what its Pod would have, and what stands for the Pod's devices.

    Args:
        step: the step.
        directory: the job it belongs to.
        base: the environment to inherit from.
        port: where the job's nodes meet on the loopback interface.
        nodes: number of steps that run together with this one.
    """
    environment = {name: value for name, value in base.items() if not _NOT_INHERITED.match(name)}
    environment["PATH"] = os.pathsep.join(
        [str(directory.path / "bin"), str(Path(sys.executable).parent), base.get("PATH") or os.defpath]
    )
    add_package_path(environment)
    environment |= {CALLED_FROM: base[CALLED_FROM]} if CALLED_FROM in base else {}
    # Logs are UTF-8 whatever the terminal speaks from which the job was started.
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
    for variable in step.env:
        value = _value_of(variable, step, directory, base)
        if value is None:
            environment.pop(variable.name, None)
        else:
            text = _expand(value, environment)
            ours = variable.name.startswith("BLUEPRINTS_")  # the recipe, which is the same everywhere
            environment[variable.name] = text if ours else _local_path(text, step, directory)
    if "PET_MASTER_ADDR" in environment:
        # The cluster's DNS name and its fixed port mean nothing here; two jobs must not meet at one port.
        environment |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if nodes > 1:
            environment.setdefault("NCCL_SOCKET_IFNAME", loopback)
    environment |= {
        "BLUEPRINTS_WORKSPACE": str(directory.workspace),
        "BLUEPRINTS_PROGRESS": str(directory.progress(step.name)),
        "BLUEPRINTS_TERMINATION_LOG": str(directory.termination(step.name)),
        "BLUEPRINTS_JOB_NAME": directory.name,
        JOB_MARKER: str(directory.path),
        STEP_MARKER: str(directory.termination(step.name)),
    }
    environment.setdefault("OMP_NUM_THREADS", str(_threads(environment, nodes)))
    return environment | _visible_gpus(step, environment, nodes)


def add_package_path(environment: dict[str, str]) -> None:
    """Let a process started with `environment` import this very installation."""
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # a checkout: its packages need not be installed
        paths = [str(root), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _threads(environment: Mapping[str, str], nodes: int) -> int:
    """A fair share of the cores for each process of this group of steps."""
    processes = environment.get("PET_NPROC_PER_NODE", "1")
    return max(1, cores() // (nodes * (int(processes) if processes.isdigit() else cores())))


def requested_gpus(step: Step) -> int:
    """GPUs the step's container asks for."""
    amounts = {**(step.resources.get("requests") or {}), **(step.resources.get("limits") or {})}
    return sum(int(parse_quantity(v)) for name, v in amounts.items() if "gpu" in name.lower() or "/mig-" in name)


def installed_gpus(base: Mapping[str, str]) -> list[str]:
    """Ids of the NVIDIA GPUs of this machine that `base` lets a process see."""
    visible = base.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [item.strip() for item in visible.split(",") if item.strip() not in ("", "-1")]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        result = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return []
    return [str(index) for index, line in enumerate(line for line in result.stdout.splitlines() if "UUID" in line)]


def _visible_gpus(step: Step, environment: Mapping[str, str], nodes: int) -> dict[str, str]:
    """A container sees the GPUs it asked for: none without asking, and no two nodes the same."""
    wanted = requested_gpus(step)
    if wanted == 0:
        return {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    present = installed_gpus(environment)
    if len(present) < wanted * nodes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(present[step.index * wanted : (step.index + 1) * wanted])}


def _value_of(variable: EnvVar, step: Step, directory: JobDirectory, base: Mapping[str, str]) -> str | None:
    if variable.secret is not None:  # there are no Secrets here: the caller's environment holds them
        return base.get(variable.secret[1], base.get(variable.name))
    if variable.field_path is None:
        return variable.value
    if _COMPLETION_INDEX.match(variable.field_path):
        return str(step.index)
    return {
        "metadata.name": f"{directory.name}-{step.replicated_job}-0-{step.index}",
        "metadata.namespace": "default",
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": directory.name,
        "spec.nodeName": socket.gethostname(),
        "status.podIP": "127.0.0.1",
        "status.hostIP": "127.0.0.1",
    }.get(variable.field_path)


def _expand(text: str, environment: Mapping[str, str]) -> str:
    """Kubernetes' `$(NAME)` references; `$$` is a literal `$` and an unknown name stays as it is."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else environment.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def _local_path(text: str, step: Step, directory: JobDirectory) -> str:
    if not any(mount.path.rstrip("/") == WORKSPACE for mount in step.mounts):
        return text
    override = _OVERRIDE.match(text)
    if override and not text[override.end() :].startswith(WORKSPACE):
        return text  # such as a chat template that speaks of /workspace: every step must read the same recipe
    return _WORKSPACE_PATH.sub(lambda _: str(directory.workspace), text)


def write_commands(directory: JobDirectory) -> None:
    """`python` and `torchrun` of this interpreter, whatever its own directory offers."""
    python = shlex.quote(sys.executable)
    for name, command in (
        ("python", python),
        ("python3", python),
        ("torchrun", f"{python} -m torch.distributed.run"),
    ):
        path = directory.path / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        path.chmod(0o755)


class Port:
    """A TCP port of the loopback interface that no other job of this user takes while it is held."""

    def __init__(self, number: int, lock: IO[bytes]) -> None:
        self.number, self._lock = number, lock

    def release(self) -> None:
        """Let others have it."""
        Path(self._lock.name).unlink(missing_ok=True)
        self._lock.close()


def reserve_port(directory: Path, candidates: Iterable[int] | None = None) -> Port:
    """A free port, reserved by a lock file below `directory`.

    Raises:
        EnvironmentFault: none is free.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Below the range from which the kernel takes ports for outgoing connections: nothing grabs it meanwhile.
    for number in candidates if candidates is not None else random.sample(range(20000, 32000), 300):
        lock = (directory / f"{number}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        # A file that was removed between opening and locking protects nothing.
        if os.fstat(lock.fileno()).st_nlink and _is_free(number):
            return Port(number, lock)
        lock.close()
    raise EnvironmentFault(
        "no free TCP port for the nodes to meet",
        where="127.0.0.1:20000-31999",
        todo="end processes that listen there, and run the job again",
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _death_signal() -> Callable[[], None] | None:
    """On Linux a step gets SIGTERM, as from an eviction, when its supervisor dies without a word."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)

    def before_exec() -> None:
        libc.prctl(set_parent_death_signal, signal.SIGTERM)

    return before_exec


_BEFORE_EXEC = _death_signal()


def start_process(
    argv: list[str], environment: Mapping[str, str], directory: Path, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a step in a session of its own, its output going to `log`.

    Raises:
        OSError: the program cannot be started.
    """
    program = shutil.which(argv[0], path=environment["PATH"])
    if program is None:
        raise FileNotFoundError(2, "command not found", argv[0])
    return subprocess.Popen(
        [program, *argv[1:]],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_BEFORE_EXEC,  # noqa: PLW1509 - safe: the supervisor has one thread
    )


def kill_marked(variable: str, value: str, *, root: int | None = None, patience: float = 5.0) -> list[int]:
    """SIGKILL every process of this user that inherited `variable=value`, and wait until they are gone.

    Workers of torchrun have sessions of their own, so a process group does not hold all that a step started; the
    environment does. Where processes' environments cannot be read (not Linux), the descendants of `root` are taken.

    Returns:
        the ids of the killed processes.
    """
    killed: list[int] = []
    deadline = time.monotonic() + patience
    while found := _marked(variable, value, root):
        for pid in found:
            killed.append(pid)
            _signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return sorted(set(killed))


def _marked(variable: str, value: str, root: int | None) -> list[int]:
    if not Path("/proc/self/environ").exists():
        return _descendants(root) if root is not None else []
    wanted = os.fsencode(f"{variable}={value}")
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def _descendants(root: int) -> list[int]:
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    alive = [(int(pid), int(parent)) for pid, parent, state in rows if not state.startswith("Z")]
    found, frontier = [], {root}
    while frontier:
        found += [pid for pid, _ in alive if pid in frontier]
        frontier = {pid for pid, parent in alive if parent in frontier}
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the process, as the kubelet signals a container's first process; nothing if it has ended."""
    if process.poll() is None:
        _signal(process.pid, number)
