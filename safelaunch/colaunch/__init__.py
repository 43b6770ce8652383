"""Many jobs on one node: a sweep is expanded, scheduled, journaled and summed up here; each job is a safelaunch run."""
