"""`CustomTrainer` and `CustomTrainerContainer` in a cluster: stand-ins for the API server and for the controllers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer, serving
from cluster_player import Player

from blueprints import CustomTrainer, CustomTrainerContainer, TrainerClient
from blueprints.client import WaitFailedError
from blueprints.errors import UsageError
from blueprints.manifests import check_train_job
from blueprints.runtimes import get_runtime
from blueprints.types import Labels, Name, TrainerArgs, TrainerCommand

RUNTIME = "jax-distributed"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with serving() as stand_in:
        for name in ("torch-distributed", RUNTIME):
            stand_in.put("clustertrainingruntimes", get_runtime(name))
        player = Player(stand_in)
        player.start()
        yield stand_in
        player.close()


@pytest.fixture(scope="module")
def client(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> TrainerClient:
    config: Path = server.kubeconfig(tmp_path_factory.mktemp("cluster") / "config")
    return TrainerClient(backend="kubernetes", kubeconfig=str(config))


def announce(word: str) -> None:
    import os

    print(word, os.environ["JAX_PROCESS_ID"], "of", os.environ["JAX_NUM_PROCESSES"], flush=True)


def refuse() -> None:
    raise ValueError("nothing will come of this")


def test_a_function_on_two_nodes(client: TrainerClient) -> None:
    trainer = CustomTrainer(func=announce, func_args={"word": '$(HOME) `x` "y"'}, num_nodes=2)
    name = client.train(runtime=RUNTIME, trainer=trainer, options=[Labels({"team": "a"})])
    assert name.startswith("announce-")
    job = client.wait_for_job_status(name, timeout=60)
    assert (job.status, job.num_nodes) == ("Complete", 2)
    assert list(client.get_job_logs(name, step="node-1")) == ['$(HOME) `x` "y" 1 of 2']
    client.delete_job(name)


def test_what_the_function_raises_is_the_failure(client: TrainerClient) -> None:
    name = client.train(runtime=RUNTIME, trainer=CustomTrainer(func=refuse))
    with pytest.raises(WaitFailedError, match="ValueError: nothing will come of this"):
        client.wait_for_job_status(name, timeout=60)


def test_an_image_with_a_command(client: TrainerClient, server: ApiServer) -> None:
    trainer = CustomTrainerContainer(image="registry.example/t:1", resources_per_node={"gpu": 2}, env={"A": "b"})
    options = [Name("image"), TrainerCommand(["python", "-c", "import os; print(os.environ['A'])"]), TrainerArgs([])]
    assert client.train(trainer=trainer, options=options) == "image"
    job = server.all("trainjobs")["image"]
    assert check_train_job({**job, "status": {}}, get_runtime("torch-distributed")) == []
    assert job["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 2}}
    client.wait_for_job_status("image", timeout=60)
    assert list(client.get_job_logs("image")) == ["b"]


def test_a_runtime_that_is_not_installed_is_told(client: TrainerClient) -> None:
    with pytest.raises(UsageError, match="xgboost-distributed"):
        client.train(runtime="xgboost-distributed", trainer=CustomTrainer(func=refuse))
