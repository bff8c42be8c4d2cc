"""This process among the others of the run: its rank, the workspace, what it prints, and a request to stop.

Standard library only, and quick to import: a SIGTERM that comes while torch is still being imported is already met.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from blueprints.errors import ExitCode

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
        return self.root / "output"


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


def hide_gpus() -> None:
    """Train on CPU, whatever the machine has: fully_shard and DeepSpeed take a GPU that they see."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DS_ACCELERATOR"] = "cpu"
