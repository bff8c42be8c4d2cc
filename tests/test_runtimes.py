"""The shipped runtimes: read without kustomize as kustomize reads them, found by name, with what they promise."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from blueprints import kustomize
from blueprints.errors import UsageError
from blueprints.manifests import check_runtime
from blueprints.recipe.schema import METHODS
from blueprints.recipe.shipped import shipped_names
from blueprints.runtimes import find_runtime, get_runtime, recipe_of, runtimes_directory, shipped_runtimes, short_name

Manifest = dict[str, Any]
ROOT = runtimes_directory()
KUSTOMIZATIONS = sorted(path.parent.relative_to(ROOT) for path in ROOT.rglob("kustomization.yaml"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=str)
def test_yaml_is_read_as_kustomize_reads_it(folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", ROOT / folder], text=True, capture_output=True, check=True)
    expected = sorted(yaml.safe_load_all(done.stdout), key=identity)
    assert sorted(kustomize.build(ROOT / folder), key=identity) == expected


def identity(manifest: Manifest) -> tuple[str, str]:
    """What tells objects apart."""
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.mark.parametrize("name", [f"llm-{method}" for method in METHODS] + ["llm-custom"])
def test_every_method_has_a_runtime_under_both_names(name: str) -> None:
    runtime = get_runtime(name)
    assert short_name(runtime) == name
    assert runtime["metadata"]["name"].startswith(f"{name}-v")
    assert get_runtime(runtime["metadata"]["name"]) == runtime
    assert recipe_of(runtime) in (None, *shipped_names())


def test_every_runtime_passes_the_validator() -> None:
    assert [str(fault) for runtime in shipped_runtimes().values() for fault in check_runtime(runtime)] == []


def test_newest_version_is_found() -> None:
    old, new = get_runtime("llm-sft"), get_runtime("llm-sft")
    for runtime, version in ((old, "v0-9"), (new, "v0-10")):
        runtime["metadata"]["name"] = f"llm-sft-{version}"
        runtime["metadata"]["labels"]["app.kubernetes.io/version"] = version
    assert find_runtime("llm-sft", [new, old]) is new
    assert find_runtime("llm-sft-v0-9", [new, old]) is old
    assert find_runtime("llm-dpo", [new, old]) is None


def test_what_this_reader_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: x-\n")
    with pytest.raises(UsageError, match="namePrefix is not supported"):
        kustomize.build(tmp_path)
