# sbatch --parsable PLACE
#!/bin/bash
#SBATCH --job-name=train.0123456789-5
#SBATCH --open-mode=append
#SBATCH --output=/sweeps/s/batches/train.0123456789-5.out
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --time=90

export MASTER_ADDR='@{first-host}'
set -- srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=0 /venv/bin/python -P -m safelaunch exec '--cluster-store=@{rdzv-port}' --run-name tasks --bundle-dir /sweeps/s/jobs/tasks/bundles -- accelerate launch t.py
exec /venv/bin/python -P -m the.task /sweeps/s/jobs/tasks 1 --cwd '/srv/it'"'"'s' -- "$@"
