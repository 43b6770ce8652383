"""Starting a job and ending it: the command line, the plan, the run directory, processes, the guardian."""
