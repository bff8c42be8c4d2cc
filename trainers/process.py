"""This process among the others of the run: its rank, the workspace, what it prints, and a request to stop.

Standard library only, and quick to import: a SIGTERM that comes while torch is still being imported is already met.
"""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from blueprints.errors import EnvironmentFault, ExitCode

LAUNCH_DIR = "BLUEPRINTS_LAUNCH_DIR"
"""Private directory in which `trainers.launch` and the training processes find each other."""
LAUNCH_PID = "BLUEPRINTS_LAUNCH_PID"


@dataclass(frozen=True)
class World:
    """Where this process stands: what torchrun or mpirun put into its environment; alone without either."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launched: bool
    """Whether a launcher (torchrun, mpirun) has started it, be it as the only one."""

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0


def world() -> World:
    """Read the world from torchrun's variables; `adopt_mpi` has made them of mpirun's."""
    env = os.environ
    return World(
        rank=int(env.get("RANK", "0")),
        size=int(env.get("WORLD_SIZE", "1")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        local_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        launched="LOCAL_RANK" in env,
    )


@dataclass(frozen=True)
class Workspace:
    """The directories and files of the workspace contract."""

    root: Path
    name: str = "output"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def dataset(self) -> Path:
        return self.root / "dataset"

    @property
    def teacher(self) -> Path:
        return self.root / "teacher"

    @property
    def teacher_logits(self) -> Path:
        return self.root / "teacher_logits"

    @property
    def output(self) -> Path:
        return self.root / self.name


def workspace() -> Workspace:
    """The job's workspace: `$BLUEPRINTS_WORKSPACE`, `/workspace` where it is not set."""
    return Workspace(Path(os.environ.get("BLUEPRINTS_WORKSPACE") or "/workspace").absolute())


def say(text: str = "") -> None:
    """Print for the user, once: rank 0 alone speaks."""
    if world().main:
        print(text, flush=True)


class Stop:
    """A request to stop (SIGTERM): at once while nothing is trained, at the next step's end during training.

    torchrun and a cluster may repeat the signal; one request is enough, and saving is never cut short by a second.
    """

    def __init__(self) -> None:
        self.asked = False
        self._deferred = False

    def listen(self) -> None:
        """Take over SIGTERM, and SIGINT so that Ctrl-C at a terminal saves as well."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked = True
        if not self._deferred:
            raise SystemExit(int(ExitCode.TERMINATED))

    def at_step_end(self) -> None:
        """From now on a signal only sets `asked`."""
        self._deferred = True

    def at_once(self) -> None:
        """From now on a signal ends the process; one that came too late for the last step does so here."""
        self._deferred = False
        if self.asked:
            raise SystemExit(int(ExitCode.TERMINATED))


STOP = Stop()


def register() -> None:
    """Make this process known to `trainers.launch`, if that runs it, and never outlive its parents.

    The launcher signals registered processes itself, because torchrun would give them 30 seconds. Whoever registers
    after the request to stop sees the launcher's `stop` file instead.
    """
    STOP.listen()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a log in ASCII must not end the training
    where = os.environ.get(LAUNCH_DIR)
    if where:
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # torchrun's own stderr is the launcher's to read
        directory = Path(where)
        (directory / f"rank-{world().rank}.exit").unlink(missing_ok=True)  # of this rank before torchrun restarted it
        (directory / f"rank-{world().rank}.pid").write_text(str(os.getpid()))
        if (directory / "stop").exists():
            raise SystemExit(int(ExitCode.TERMINATED))
    if world().launched:
        threading.Thread(target=_die_with_parents, args=(os.getppid(),), daemon=True).start()


def _die_with_parents(parent: int) -> None:
    """End this process when torchrun or the launcher was killed: a second run must not find it writing."""
    launcher = int(os.environ.get(LAUNCH_PID, "0"))
    while os.getppid() == parent and (not launcher or _alive(launcher)):
        time.sleep(0.5)
    os._exit(int(ExitCode.TERMINATED))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def leave_exit_code(code: int) -> None:
    """Tell the launcher how this process ends; torchrun would turn every code into 1."""
    where = os.environ.get(LAUNCH_DIR)
    if where:
        target = Path(where) / f"rank-{world().rank}.exit"
        temporary = target.with_suffix(".tmp")
        temporary.write_text(f"{code} {time.time():.6f}")
        temporary.replace(target)


MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
"""Where Open MPI says what torchrun says by other names."""
MPI_PATIENCE = 300.0
"""Seconds the other ranks give rank 0 to say where it can be met: nodes do not all start at once."""


def adopt_mpi() -> None:
    """Under mpirun: say in torchrun's variables what Open MPI says in its own; torchrun's go first.

    The address where all meet is the environment's `MASTER_ADDR` and `MASTER_PORT` (29500 where only the address is
    given). Without them rank 0 chooses a free port and leaves it in the workspace, which all nodes share.

    Raises:
        EnvironmentFault: rank 0 has left no address there in time.
    """
    env = os.environ
    if "RANK" in env or MPI["RANK"] not in env:
        return
    for ours, theirs in MPI.items():
        env[ours] = env[theirs]
    if "MASTER_ADDR" in env:
        env.setdefault("MASTER_PORT", "29500")
        return
    job = re.sub(r"\W+", "-", env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "job")
    path = workspace().root / f".mpi-{job}"
    env["MASTER_ADDR"], env["MASTER_PORT"] = _offer(path) if world().main else _meet(path)


def _offer(path: Path) -> tuple[str, str]:
    """Rank 0: a free port of this machine, written where the others look."""
    alone = world().local_size == world().size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1" if alone else "", 0))
        port = str(probe.getsockname()[1])
    host = "127.0.0.1" if alone else socket.gethostname()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(f"{host} {port}")
    temporary.replace(path)
    return host, port


def _meet(path: Path) -> tuple[str, str]:
    """The other ranks: what rank 0 has written since this job began."""
    began = time.time()
    while time.time() - began < MPI_PATIENCE:
        # A file of an earlier job that was killed does not count; clocks of nodes differ by seconds.
        if path.exists() and path.stat().st_mtime > began - 30:
            host, port = path.read_text().split()
            return host, port
        time.sleep(0.2)
    raise EnvironmentFault(
        f"rank 0 has not said within {MPI_PATIENCE:.0f} s where it can be met",
        where=str(path),
        todo="do all nodes mount the same workspace? Or set MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR=HOST)",
    )


def forget_mpi() -> None:
    """Remove what `adopt_mpi` has left in the workspace: all have met."""
    if MPI["RANK"] in os.environ and world().main:
        for path in workspace().root.glob(".mpi-*"):
            path.unlink(missing_ok=True)


def hide_gpus() -> None:
    """Train on CPU, whatever the machine has: fully_shard and DeepSpeed take a GPU that they see."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DS_ACCELERATOR"] = "cpu"
