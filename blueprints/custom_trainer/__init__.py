"""A function or an image of one's own as a TrainJob: `CustomTrainer` and `CustomTrainerContainer` of the Kubeflow SDK."""

from blueprints.custom_trainer.job import DEFAULT_RUNTIME, custom_job, custom_name, for_this_machine, set_words
from blueprints.custom_trainer.types import CustomTrainer, CustomTrainerContainer

__all__ = [
    "DEFAULT_RUNTIME", "CustomTrainer", "CustomTrainerContainer", "custom_job", "custom_name", "for_this_machine",
    "set_words",
]  # fmt: skip
