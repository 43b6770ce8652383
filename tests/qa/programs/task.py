"""``apart.py`` as a task of srun: no launcher has set the rank variables, so the script does, as many do."""

import os

for name, source in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
    os.environ[name] = os.environ[source]

from apart import main

main()
