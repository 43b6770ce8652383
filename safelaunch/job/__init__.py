"""Starts and ends a job: the command line, the plan, the run directory, processes, the guardian."""
