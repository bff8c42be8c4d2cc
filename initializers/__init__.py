"""Steps that bring a model and a dataset into the workspace; they run on CPU nodes."""
