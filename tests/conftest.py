"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest

# Test workers share the machine: one thread each, in every process they start, before anything loads OpenMP.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The embedding shell's own settings are no part of a test.
for name in ("LORA_CONFIG", "BLUEPRINTS_RECIPE", "BLUEPRINTS_OVERRIDES", "BLUEPRINTS_WORKSPACE"):
    os.environ.pop(name, None)

# The same examples in every run: a red run means that a change broke something. HYPOTHESIS_PROFILE=random explores.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


class _ProvedHere:
    """A proof that ran in this process, as `trainers.proof` sees the one it starts."""

    def __init__(self, specification: Path, flags: Sequence[str]) -> None:
        from trainers import prove

        self.returncode = prove.main([str(specification), *flags])

    def communicate(self) -> tuple[str, None]:
        return "", None

    def kill(self) -> None: ...

    def wait(self) -> None: ...


@pytest.fixture
def proved_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact proof in this process, not in a fresh one: seconds less, where the proof is not what is tested."""
    from trainers import proof

    monkeypatch.setattr(proof, "_start", _ProvedHere)
