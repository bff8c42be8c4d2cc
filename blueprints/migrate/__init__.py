"""From the jobs of Training Operator v1 and MPI Operator to TrainJobs with a runtime of their own.

`migrate_file` reads PyTorchJobs (`kubeflow.org/v1`) and MPIJobs (`kubeflow.org/v1`, `v2beta1`). Each becomes a TrainJob
with what belongs to the run (nodes, command, environment, resources) and a runtime with what belongs to the place (image,
volumes, security, scheduling, retries). What has no counterpart is told, never dropped in silence.
"""

from blueprints.migrate.read import Migration, Remark, migrate_file

__all__ = ["Migration", "Remark", "migrate_file"]
