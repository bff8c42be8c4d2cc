"""A Kubernetes cluster with Kubeflow Trainer: creates TrainJobs, watches them and tells the truth about them."""
