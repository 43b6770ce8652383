"""Compares what must be equal on all ranks (weights, gradients, batches) while a job runs: ``--check-every``."""
