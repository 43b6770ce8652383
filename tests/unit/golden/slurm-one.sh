# sbatch --parsable PLACE
#!/bin/bash
#SBATCH --job-name=train.0123456789-3
#SBATCH --open-mode=append
#SBATCH --output=/sweeps/s/batches/train.0123456789-3.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --time=122
#SBATCH --partition=gpu
#SBATCH --mem=32G

set -- /venv/bin/python -P -m safelaunch --run-name a --bundle-dir /sweeps/s/jobs/a/bundles --nproc-per-node=2 train.py
exec /venv/bin/python -P -m the.task /sweeps/s/jobs/a 1 --cwd '/srv/it'"'"'s' --timeout 7200 -- "$@"
