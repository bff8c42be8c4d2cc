"""The trainers of one's own, with the names and fields of the Kubeflow SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blueprints.errors import UsageError
from blueprints.types import require_type


@dataclass(frozen=True)
class CustomTrainer:
    """Training by a function of one's own, on every node.

    The function's source travels in the TrainJob, so it has to be self-contained: imports inside, no names of the module
    around it. torchrun starts it, once per process, with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and
    `MASTER_PORT` set.

    Attributes:
        func: the function.
        func_args: its keyword arguments: numbers, strings, None, and lists, tuples, sets and dictionaries of these.
        image: image of the nodes. Default: the runtime's. On this machine it runs in this Python.
        packages_to_install: requirements as pip takes them, installed for this job alone before the function starts.
        pip_index_urls: package indexes, the first one instead of PyPI. Default: as pip is configured where it runs.
        num_nodes: nodes. Default: the runtime's.
        resources_per_node: such as `{"gpu": 4, "cpu": 8, "memory": "64Gi"}`; `gpu` is `nvidia.com/gpu`, `mig-1g.5gb` is
            `nvidia.com/mig-1g.5gb`, other resources are given by their full name.
        env: environment variables of the nodes.

    Raises:
        UsageError: a field is of another type than it should be.
    """

    func: Callable[..., object]
    func_args: Mapping[str, Any] | None = None
    image: str | None = None
    packages_to_install: Sequence[str] | None = None
    pip_index_urls: Sequence[str] | None = None
    num_nodes: int | None = None
    resources_per_node: Mapping[str, Any] | None = None
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        require_type(self.func_args, (Mapping, type(None)), "CustomTrainer(func_args=...)", "a dictionary of arguments")
        for name in ("packages_to_install", "pip_index_urls"):
            values = vars(self)[name]
            if isinstance(values, str) or not all(isinstance(value, str) and value for value in values or ()):
                where = f"CustomTrainer({name}=...)"
                raise UsageError(f"found {values!r}", where=where, todo="give a list of strings")
        if options := [value for value in self.packages_to_install or () if value.startswith("-")]:
            where = "CustomTrainer(packages_to_install=...)"
            raise UsageError(f"{options[0]!r} is an option of pip", where=where, todo="give requirements alone")
        _check_common("CustomTrainer", self.image, self.num_nodes, self.resources_per_node, self.env)


@dataclass(frozen=True)
class CustomTrainerContainer:
    """Training by an image of one's own, in a cluster.

    Attributes:
        image: the image; its entry point starts the training, unless a `TrainerCommand` option says otherwise.
        num_nodes: nodes. Default: the runtime's.
        resources_per_node: as of `CustomTrainer`.
        env: environment variables of the nodes.

    Raises:
        UsageError: a field is of another type than it should be.
    """

    image: str
    num_nodes: int | None = None
    resources_per_node: Mapping[str, Any] | None = None
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        require_type(self.image, str, "CustomTrainerContainer(image=...)", "an image reference")
        _check_common("CustomTrainerContainer", self.image, self.num_nodes, self.resources_per_node, self.env)


def _check_common(title: str, image: object, nodes: object, resources: object, env: object) -> None:
    require_type(image, (str, type(None)), f"{title}(image=...)", "an image reference")
    if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1):
        raise UsageError(f"found {nodes!r}", where=f"{title}(num_nodes=...)", todo="give a whole number of at least 1")
    require_type(
        resources, (Mapping, type(None)), f"{title}(resources_per_node=...)", 'a dictionary such as {"gpu": 1}'
    )
    require_type(env, (Mapping, type(None)), f"{title}(env=...)", "a dictionary of names and strings")
    for name, value in (env or {}).items() if isinstance(env, Mapping) else ():
        if not isinstance(name, str) or not isinstance(value, str):
            todo = f'write "{str(value).lower() if isinstance(value, bool) else value}"'
            raise UsageError(f"{name}: {value!r} is not a string", where=f"{title}(env=...)", todo=todo)
