"""How a v1 container starts its program, and how it has to be started now.

Training Operator gave every Pod `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, one process per Pod, so a plain
`python train.py` could call `init_process_group`. Kubeflow Trainer sets torchrun's own `PET_*` variables alone. Therefore:

- a plain `python` is started by torchrun, which gives its one process per node the same four variables;
- what starts torchrun itself stays as it is;
- anything else (a shell, another launcher, the image's own entry point), and what refers to `$(RANK)`, gets the four
  variables as the old operator set them, and stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blueprints.jobset import COMPLETION_INDEX, MASTER_PORT
from blueprints.runtimes import TRAINER_CONTAINER, Manifest

OLD_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PYTHON = re.compile(r"^(.*/)?python(\d+(\.\d+)?)?$")
_FLAGS = re.compile(r"^-[bBdEiIOPqRsSuvx]+$")
_WITH_VALUE = ("-W", "-X")
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_REFERENCE = re.compile(rf"\$[({{]?({'|'.join(OLD_VARIABLES)})\b")


@dataclass(frozen=True)
class Launch:
    """How the main container of a node starts.

    Attributes:
        command, args: of the container; None where the v1 job had none.
        by_torchrun: whether torchrun starts the program.
        unbuffered: `python -u` was asked for, which torchrun does not take.
        remark: what was changed and why; empty if nothing was.
    """

    command: list[str] | None
    args: list[str] | None
    by_torchrun: bool
    unbuffered: bool = False
    remark: str = ""


def launch_of(command: list[str] | None, args: list[str] | None, processes: int) -> Launch:
    """How to start what a v1 container started.

    Args:
        command: of the container.
        args: of the container.
        processes: that v1 counted per Pod: `nprocPerNode` if it is a number, else 1.
    """
    words = [*(command or []), *(args or [])]
    if not command:
        return Launch(command, args, by_torchrun=False)
    program = words[0].rpartition("/")[2]
    if program == "torchrun":
        return Launch(command, args, by_torchrun=True)
    if not _PYTHON.match(words[0]):
        return Launch(command, args, by_torchrun=False)
    options, target = _split(words[1:])
    if target[:1] == ["-m"] and target[1:2] and target[1] in _TORCHRUN:
        return Launch(command, args, by_torchrun=True)
    if not target or target[0] == "-" or processes > 1 or _is_launcher(target):
        return Launch(command, args, by_torchrun=False)
    return _through_torchrun(command, args, options, target)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The interpreter's options, and the script (or `-m MODULE`, `-c CODE`) with its arguments."""
    place = 0
    while place < len(words):
        if words[place] in _WITH_VALUE:
            place += 2
        elif _FLAGS.match(words[place]) or words[place][:2] in _WITH_VALUE:
            place += 1
        else:
            break
    return words[:place], words[place:]


def _is_launcher(target: list[str]) -> bool:
    return target[0] == "-m" and target[1:2] != [] and target[1].split(".")[0] in ("accelerate", "deepspeed", "horovod")


def _through_torchrun(command: list[str], args: list[str] | None, options: list[str], target: list[str]) -> Launch:
    plain = command[0] in ("python", "python3") and set(options) <= {"-u"} and target[0] != "-c"
    why = "Trainer sets PET_* alone, and torchrun makes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of them"
    if not plain:  # options of the interpreter, or an interpreter by its path: torchrun starts the whole command
        remark = f"{command[0]!r} is started by `torchrun --no-python`: {why}"
        return Launch(["torchrun", "--no-python", *command], args, by_torchrun=True, remark=remark)
    gone = 1 + len(options)
    left = max(0, gone - len(command))
    after = None if args is None else args[left:]
    return Launch(
        ["torchrun", *command[gone:]], after, by_torchrun=True, unbuffered=bool(options),
        remark=f"`{command[0]}` became `torchrun`: {why}",
    )  # fmt: skip


def refers_to_old_variables(texts: list[str]) -> bool:
    """Whether a command or a variable's value speaks of a variable that the old operator set."""
    return any(_REFERENCE.search(text) for text in texts)


def old_variables(name: str, nodes: int, processes: int) -> list[Manifest]:
    """`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` as the old operator set them, for the Pods of a TrainJob.

    Args:
        name: of the TrainJob.
        nodes: its Pods.
        processes: that v1 counted per Pod.
    """
    return [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}},
        {"name": "WORLD_SIZE", "value": str(nodes * processes)},
        {"name": "MASTER_ADDR", "value": f"{name}-{TRAINER_CONTAINER}-0-0.{name}"},
        {"name": "MASTER_PORT", "value": str(MASTER_PORT)},
    ]
