"""`python -m trainers.launch torchrun -m trainers ...`: run torchrun and end as its training processes did.

torchrun alone gives its processes 30 seconds after SIGTERM and always exits 1. Here SIGTERM goes to the training
processes themselves, which then have the Pod's whole grace period to save; the exit code is that of the process that
failed first, 128 + N if signal N killed it, 143 after a stop, and 5 when torchrun could not start them (port in use,
no rendezvous). A second signal
kills. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from blueprints.errors import BlueprintError, EnvironmentFault, ExitCode, JobFailedError, UsageError
from blueprints.termination import write_termination
from trainers.process import LAUNCH_DIR, LAUNCH_PID

KEPT_LINES = 60
"""Lines of torchrun's own output that are shown when it fails by itself."""
DRAIN_SECONDS = 5.0
"""Patience with torchrun's output after it has ended."""
STRAGGLE_SECONDS = 10.0
"""What the others get to end by themselves after one has failed; torchrun would give them 30 seconds more."""
KILLED = re.compile(r"host\s*:\s*(\S+).*?rank\s*:\s*(\d+).*?exitcode\s*:\s*-(\d+)\s*\(pid: (\d+)\)", re.DOTALL)
"""An entry of torchrun's table of failures: host, rank, signal and process id of a training process killed by one."""
NO_START = re.compile(
    r"EADDRINUSE|[Aa]ddress already in use|rendezvous|Rendezvous|DistNetworkError|DistStoreError|timed out"
)


class Launcher:
    """One torchrun and the training processes under it.

    Args:
        command: the command line, torchrun first.
        directory: private directory where the processes leave their ids and exit codes.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self.directory = directory
        self.stopping = False
        self._ended_here: set[str] = set()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        environment = os.environ | {LAUNCH_DIR: str(directory), LAUNCH_PID: str(os.getpid())}
        # Signals must come through here alone: a Ctrl-C at a terminal goes to a whole process group.
        self.torchrun = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Keep what torchrun itself says: noise after a failure that a training process has explained already."""
        assert self.torchrun.stderr is not None
        for line in self.torchrun.stderr:
            self._lines.append(line.rstrip())

    def on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        """First signal: ask every training process to save and end. Second: kill."""
        if self.stopping:
            self.kill()
            return
        self.stopping = True
        (self.directory / "stop").touch()
        pids = self.workers()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not pids:
            # Nothing is trained yet, so there is nothing to save.
            self.torchrun.terminate()

    def workers(self) -> list[int]:
        """Process ids of the training processes that have started and not ended."""
        found = []
        for path in self.directory.glob("rank-*.pid"):
            if not path.with_suffix(".exit").exists():
                text = path.read_text()
                if text:
                    found.append(int(text))
        return found

    def kill(self) -> None:
        """End everything at once."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.torchrun.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for torchrun's end.

        Returns:
            the exit code for the container.
        """
        code: int | None = None
        while code is None:
            try:
                code = self.torchrun.wait(1)
            except subprocess.TimeoutExpired:
                self._end_stragglers()
        self._reader.join(DRAIN_SECONDS)
        failed = self._failures()
        if code == 0 and not failed:
            return int(ExitCode.DONE)
        killed = None if self.stopping else self._killed()
        if killed:
            return self._report_killed(killed)
        if failed:
            return failed[0][1]
        if self.stopping:
            return int(ExitCode.TERMINATED)
        return self._unexplained(code)

    def _end_stragglers(self) -> None:
        """Kill what still waits for a process that has failed: a collective on a GPU does not notice by itself."""
        ended = [
            path.stat().st_mtime for path in self.directory.glob("rank-*.exit") if not path.read_text().startswith("0 ")
        ]
        if self.stopping or not ended or time.time() - min(ended) < STRAGGLE_SECONDS:
            return
        for path in self.directory.glob("rank-*.pid"):
            text = path.read_text()
            # One that was started after the failure is torchrun's new attempt.
            if text and not path.with_suffix(".exit").exists() and path.stat().st_mtime < min(ended):
                self._ended_here.add(text)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(text), signal.SIGKILL)

    def _killed(self) -> re.Match[str] | None:
        """The first training process that a signal has ended, other than torchrun's own SIGTERM or ours to stragglers."""
        ended = {path.stem for path in self.directory.glob("rank-*.exit")}
        table = re.split(r"^\[\d+\]:", "\n".join(self._lines), flags=re.MULTILINE)
        found = [entry for entry in map(KILLED.search, table) if entry]
        entries = [entry for entry in found if int(entry[3]) != signal.SIGTERM]
        last = [entry for entry in entries if f"rank-{entry[2]}" not in ended and entry[4] not in self._ended_here]
        return last[-1] if last else None  # torchrun lists the first failure last, as the root cause

    def _report_killed(self, killed: re.Match[str]) -> int:
        host, rank, number, pid = killed[1], killed[2], int(killed[3]), killed[4]
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        memory = "; SIGKILL usually means that the machine's or the container's memory was used up"
        error = JobFailedError(
            f"a training process was killed by {name}{memory if number == signal.SIGKILL else ''}",
            where=f"rank {rank}, pid {pid}, node {host}",
            todo="give it more memory or lower training.per_device_train_batch_size; the same command goes on from "
            "the last checkpoint",
        )
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_termination(error)
        return 128 + number  # the shell's convention; unlike a failed training, it may succeed when run again

    def _failures(self) -> list[tuple[float, int]]:
        """Time and code of every training process that ended with another code than 0, in order of time.

        A stop on request comes last: of two ranks the one that failed by itself is the cause.
        """
        found = []
        for path in self.directory.glob("rank-*.exit"):
            code, when = path.read_text().split()
            if int(code):
                found.append((float(when), int(code)))
        return sorted(found, key=lambda entry: (entry[1] == ExitCode.TERMINATED and not self.stopping, entry[0]))

    def _unexplained(self, code: int) -> int:
        """No training process has said why: it crashed, or torchrun did not get to start one."""
        said = "\n".join(self._lines)
        error: BlueprintError
        started = any(self.directory.glob("rank-*.pid"))
        known = NO_START.search(said) is not None
        if not known:
            print(said, file=sys.stderr)
        if started and not known:
            error = JobFailedError(
                f"the training processes ended without saying why (torchrun: exit code {code})",
                todo="see the lines above; the same command goes on from the last checkpoint",
            )
        else:
            error = EnvironmentFault(
                f"torchrun could not start the training processes (exit code {code}): {_cause(self._lines)}",
                where=f"{os.environ.get('PET_MASTER_ADDR', '')}:{os.environ.get('PET_MASTER_PORT', '')}".strip(":"),
                todo="is the port free, and can all nodes reach the first one?"
                if known
                else "see the lines above: did Python find torch and trainers?",
            )
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_termination(error)
        return int(error.exit_code)


def literal(command: Sequence[str]) -> list[str]:
    """The command with the arguments after `-m MODULE` as torchrun hands them on unchanged.

    torchrun reads them as templates: it would replace `$local_rank` and make `$` of `$$`.
    """
    words = list(command)
    if not Path(words[0]).name.startswith("torchrun"):
        return words  # mpirun hands them on as they are
    start = words.index("-m") + 2 if "-m" in words else len(words)
    return words[:start] + [word.replace("$", "$$") for word in words[start:]]


def _cause(lines: Sequence[str]) -> str:
    """The last line that names an error."""
    named = [line.strip() for line in lines if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
    return (named or [line.strip() for line in lines if line.strip()] or ["it said nothing"])[-1][:400]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given as arguments; see the module's docstring for the exit codes."""
    command = list(sys.argv[1:] if argv is None else argv)
    if not command or command[0] in ("-h", "--help"):
        print("usage: python -m trainers.launch torchrun [OPTION]... -m trainers --recipe NAME [key=value]...")
        return int(ExitCode.DONE if command else ExitCode.USER_INPUT)
    with tempfile.TemporaryDirectory(prefix="llm-blueprints-") as directory:
        try:
            launcher = Launcher(literal(command), Path(directory))
        except (FileNotFoundError, PermissionError) as error:
            fault = UsageError(f"cannot run {command[0]!r}: {error.strerror}", todo="give torchrun's command line")
            print(f"error: {fault}", file=sys.stderr)
            write_termination(fault)
            return int(fault.exit_code)
        signal.signal(signal.SIGTERM, launcher.on_signal)
        signal.signal(signal.SIGINT, launcher.on_signal)
        return launcher.wait()


if __name__ == "__main__":
    sys.exit(main())
