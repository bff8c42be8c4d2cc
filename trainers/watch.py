"""A run of several processes is as fast as its slowest, and waits for ever for one that hangs. The watch ends that.

Every process has a thread that says twice a minute or oftener, through the store in which torchrun's processes meet,
that it is alive, how far its main thread has come and where that stands. A process that stops saying so, or that does
not come on while others wait for it, is named with its node, and the job ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from blueprints.errors import BlueprintError, EnvironmentFault, JobFailedError
from blueprints.termination import write_termination
from trainers.process import World, leave_exit_code

PERIOD = 2.0
"""Seconds between two signs of life."""
SILENCE = 60.0
"""Seconds without a sign of life after which a process counts as gone; `training.ddp_timeout` if that is less."""
STARTUP = 2
"""Until the first step is done, this many `training.ddp_timeout` may pass: models are loaded, kernels compiled."""
VERDICT = "verdict"
LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python")
COLLECTIVE = (
    f"torch{os.sep}distributed{os.sep}",
    f"deepspeed{os.sep}comm{os.sep}",
    f"deepspeed{os.sep}runtime{os.sep}",
)


@dataclass
class Sign:
    """The last sign of life of one process, and when, by this process's clock, it came."""

    said: Mapping[str, Any]
    came: float


class Watch:
    """The watch of this process. Inactive until `start`; `tick` costs nothing then.

    Attributes:
        on_end: called with the cause before the watch ends this process, so that the run record holds it.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[BlueprintError], None] | None = None
        self._world: World | None = None
        self._store: Any = None
        self._limit = 0.0
        self._ticks = 0
        self._step = 0
        self._ticked = time.monotonic()
        self._paused = False
        self._warned = False
        self._beats = 0
        self._signs: dict[int, Sign] = {}
        self._lost: str | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident or 0

    def start(self, world: World, limit: float) -> None:
        """Watch over the processes of `world`; `limit` is `training.ddp_timeout`."""
        if world.size == 1:
            return
        self._world, self._limit = world, limit
        self._store = _connect(limit)
        self.tick()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def tick(self, step: int | None = None) -> None:
        """The main thread has come on: a step, a micro-step, an evaluated or generated batch."""
        self._ticks += 1
        self._ticked = time.monotonic()
        if step is not None:
            self._step = max(self._step, step)

    @contextlib.contextmanager
    def paused(self) -> Any:
        """The others wait, rightly, for as long as it takes; that this process is alive is watched all the same."""
        self._paused = True
        try:
            yield
        finally:
            self.tick()
            self._paused = False

    def stop(self) -> None:
        """End the watch: the run is over."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(3 * PERIOD)

    def fail(self, error: BlueprintError) -> None:
        """Tell the other processes what ends this one."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone: the others have ended
                self._store.set(f"failed-{_rank(self._world)}", error.problem[:400])
            self._closed.set()

    def lost(self) -> str:
        """Which process has gone, in words; empty if the watch cannot tell. Takes a few seconds."""
        if self._store is None:
            return ""
        if self._lost is None:
            self._closed.set()  # this process is about to end
            self._lost = self._find_lost()
        return self._lost

    def _find_lost(self) -> str:
        try:
            before = self._read()
            time.sleep(2 * PERIOD)
            after = self._read()
            for rank, sign in after.items():
                if rank != _rank(self._world) and sign["beat"] == before.get(rank, {}).get("beat"):
                    return f"{_name(rank, sign)} {self._reason(rank)}"
        except RuntimeError:
            return "rank 0 has gone: the store in which the processes meet does not answer any more"
        return ""

    def _reason(self, rank: int) -> str:
        key = f"failed-{rank}"
        if self._store.check([key]):
            return f"has failed: {self._store.get(key).decode()}"
        return "has gone: it was killed, or its node is gone"

    def _run(self) -> None:
        assert self._world is not None
        try:
            while not self._closed.wait(min(PERIOD, self._limit / 10)):
                self._say()
                if self._store.check([VERDICT]):
                    self._end(json.loads(self._store.get(VERDICT)))
                if self._world.local_rank < 2:
                    self._judge()
        except RuntimeError:
            # The store is gone, and with it torchrun or, under mpirun, rank 0. The main thread may notice by itself.
            if not self._closed.wait(2 * PERIOD):
                self._end(self._verdict(silent_store()))

    def _say(self) -> None:
        self._beats += 1
        place, waits = where_it_stands(sys._current_frames().get(self._main))
        sign = {
            "beat": self._beats,
            "ticks": self._ticks,
            "step": self._step,
            "idle": 0.0 if self._paused else time.monotonic() - self._ticked,
            "place": place,
            "waits": waits,
            "node": os.uname().nodename,
            "pid": os.getpid(),
        }
        self._store.set(f"rank-{_rank(self._world)}", json.dumps(sign))

    def _read(self) -> dict[int, dict[str, Any]]:
        assert self._world is not None
        keys = [f"rank-{rank}" for rank in range(self._world.size)]
        known = {rank: key for rank, key in enumerate(keys) if self._store.check([key])}
        return {rank: json.loads(self._store.get(key)) for rank, key in known.items()}

    def _judge(self) -> None:
        now = time.monotonic()
        signs = self._read()
        for rank, said in signs.items():
            if rank not in self._signs or self._signs[rank].said["beat"] != said["beat"]:
                self._signs[rank] = Sign(said, now)
        silence = min(SILENCE, self._limit)
        silent = {rank: now - sign.came for rank, sign in self._signs.items() if now - sign.came > silence}
        if silent:
            rank = min(silent)
            self._accuse(silent_rank(rank, self._signs[rank].said, silent[rank]))
            return
        idle = min(float(sign["idle"]) for sign in signs.values())
        started = any(sign["step"] for sign in signs.values())
        limit = self._limit * (1 if started else STARTUP)
        if len(signs) < _size(self._world) or idle < min(30.0, limit / 2):
            self._warned = False
        elif idle > limit:
            self._accuse(hung_rank(signs, idle))
        elif not self._warned:
            self._warned = True
            rank = suspect(signs)
            print(
                f"no process has come on for {idle:.0f} s: waiting for {_name(rank, signs[rank])}, which is in "
                f"{signs[rank]['place']}; the run ends after {limit:.0f} s (training.ddp_timeout)",
                flush=True,
            )

    def _verdict(self, error: BlueprintError) -> dict[str, Any]:
        return error.as_dict() | {"by": _rank(self._world)}

    def _accuse(self, error: BlueprintError) -> None:
        """The first verdict counts: all processes read it and end."""
        verdict = self._verdict(error)
        # Of judges on several nodes one is the first; where the store has died, each ends its own node.
        if self._store.add(f"{VERDICT}-claims", 1) == 1:
            self._store.set(VERDICT, json.dumps(verdict))
            self._end(verdict)

    def _end(self, verdict: Mapping[str, Any]) -> None:
        """End this process; its main thread may never return from where it waits."""
        assert self._world is not None
        kind = JobFailedError if verdict["code"] == "JOB_FAILED" else EnvironmentFault
        error = kind(str(verdict["problem"]), where=str(verdict["where"]), todo=str(verdict["todo"]))
        if verdict["by"] == self._world.rank or self._world.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        write_termination(error)
        if self.on_end is not None:
            self.on_end(error)
        leave_exit_code(int(error.exit_code))
        if verdict["by"] == self._world.rank:
            time.sleep(2 * PERIOD)  # this may be the process that holds the store: let the others read
        os._exit(int(error.exit_code))


def _connect(limit: float) -> Any:
    """A connection of its own to the store in which the processes have met."""
    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=min(SILENCE, limit)),
        wait_for_workers=False,
    )
    # torchrun's store outlives a restart of the processes, and so would the signs of the dead ones.
    return torch.distributed.PrefixStore(f"watch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def where_it_stands(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread stands: the innermost line that is no library's, and the innermost of all.

    Returns:
        the place in words; whether the thread waits for other processes.
    """
    inner = own = ""
    waits = False
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        place = f"{_short(name)}:{frame.f_lineno} {code.co_name}"
        inner = inner or place
        waits = waits or any(part in name for part in COLLECTIVE) or code.co_name == "_engine_run_backward"
        if not own and not any(part in name for part in LIBRARIES) and not name.startswith("<"):
            own = place
        frame = frame.f_back
    return (inner if not own or own == inner else f"{own} (in {inner})"), waits


def _short(path: str) -> str:
    for mark in LIBRARIES[:2]:
        if mark in path:
            return path.partition(mark)[2].lstrip(os.sep)
    return str(Path(path))


def suspect(signs: Mapping[int, Mapping[str, Any]]) -> int:
    """The process that the others wait for: one that does not wait itself; of several the one that has come least far."""
    free = [rank for rank, sign in signs.items() if not sign["waits"]]
    among = free if 0 < len(free) < len(signs) else list(signs)
    return min(among, key=lambda rank: (signs[rank]["ticks"], -float(signs[rank]["idle"]), rank))


def silent_rank(rank: int, sign: Mapping[str, Any], seconds: float) -> BlueprintError:
    """The error for a process that gives no sign of life."""
    return EnvironmentFault(
        f"{_name(rank, sign)} has given no sign of life for {seconds:.0f} s; it was at step {sign['step']}, "
        f"in {sign['place']}",
        where=f"rank {rank}, node {sign['node']}",
        todo="is the node up, its network whole, the process (pid "
        f"{sign['pid']}) stopped or short of memory? The same command goes on from the last checkpoint",
    )


def silent_store() -> BlueprintError:
    """The error where the store in which the processes meet does not answer."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return EnvironmentFault(
        f"the store in which the processes meet does not answer: rank 0 is stopped or gone, or its node ({address}) is",
        where="rank 0",
        todo="is that node up, its network whole, the process stopped or short of memory? The same command goes on from "
        "the last checkpoint",
    )


def hung_rank(signs: Mapping[int, Mapping[str, Any]], seconds: float) -> BlueprintError:
    """The error for a process that is alive and does not come on."""
    rank = suspect(signs)
    sign = signs[rank]
    others = "; ".join(
        f"rank {other}: {'waits in' if said['waits'] else 'is in'} {said['place']}"
        for other, said in sorted(signs.items())[:8]
        if other != rank
    )
    problem = (
        f"no process has come on for {seconds:.0f} s, and the others wait for {_name(rank, sign)}: at step "
        f"{sign['step']} it is in {sign['place']}. {others}"
    )
    where = f"rank {rank}, node {sign['node']}"
    if all(said["waits"] for said in signs.values()):
        return EnvironmentFault(
            problem,
            where=where,
            todo="all wait for each other: is the network between the nodes whole, and do all run the same code and "
            "data? The same command goes on from the last checkpoint",
        )
    return JobFailedError(
        problem,
        where=where,
        todo="look at that line: does it wait for something that never comes? If it only takes long, raise "
        "training.ddp_timeout. The same command goes on from the last checkpoint",
    )


def _name(rank: int, sign: Mapping[str, Any]) -> str:
    return f"rank {rank} on node {sign['node']}"


def _rank(world: World | None) -> int:
    return world.rank if world else 0


def _size(world: World | None) -> int:
    return world.size if world else 1


WATCH = Watch()
