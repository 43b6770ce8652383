"""The Slurm engine: hands jobs over with sbatch, follows them with squeue, and needs no accounting.

``script`` writes the scripts, ``queue`` asks Slurm, ``task`` runs inside the job, ``claims`` are the files that it
leaves, ``judge`` (pure) says from both how a job stands, and ``engine`` puts them together.
"""
