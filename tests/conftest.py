"""What holds for every test."""

from __future__ import annotations

import os

import hypothesis

# Test workers share the machine: one thread each, in every process they start, before anything loads OpenMP.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The embedding shell's own settings are no part of a test.
for name in ("LORA_CONFIG", "BLUEPRINTS_RECIPE", "BLUEPRINTS_OVERRIDES", "BLUEPRINTS_WORKSPACE"):
    os.environ.pop(name, None)

# The same examples in every run: a red run means that a change broke something. HYPOTHESIS_PROFILE=random explores.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
