"""Trainers: one file per fine-tuning method, run as `torchrun -m trainers`."""
