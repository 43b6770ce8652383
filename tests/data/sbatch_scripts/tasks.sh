# sbatch --parsable --job-name=train.0123456789-5 --open-mode=append --output=100%% --nodes=4 --ntasks-per-node=1 --gres=gpu:1 --time=90 PLACE
#!/bin/bash
export MASTER_ADDR='@{first-host}'
exec /venv/bin/python -P -m the.task slurm train.0123456789-5 /sweeps/s/jobs/tasks 1 --cwd '/srv/it'"'"'s' -- srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=0 /venv/bin/python -P -m safelaunch exec '--cluster-store=@{rdzv-port}' --run-name tasks --bundle-dir /sweeps/s/jobs/tasks/bundles -- accelerate launch t.py
