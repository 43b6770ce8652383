# sbatch --parsable --job-name=train.0123456789-5 --open-mode=append --output=100%% --nodes=1 --ntasks-per-node=1 --gres=gpu:2 --time=122 --partition=gpu --mem=32G PLACE
#!/bin/bash
exec /venv/bin/python -P -m the.task slurm train.0123456789-5 /sweeps/s/jobs/a 1 --cwd '/srv/it'"'"'s' --timeout 7200 -- /venv/bin/python -P -m safelaunch --run-name a --bundle-dir /sweeps/s/jobs/a/bundles --nproc-per-node=2 train.py
