"""Trainers: one file per fine-tuning method, run as `torchrun -m trainers`."""

import os

# OpenMP threads wait for each other by spinning. When other work wants the same CPUs that makes steps many times slower;
# spinning briefly and then sleeping costs nothing measurable on free CPUs. Read once, when torch is loaded.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"
