# sbatch --parsable --dependency=afterok:12:13_0 --kill-on-invalid-dep=yes PLACE
#!/bin/bash
#SBATCH --job-name=train.0123456789-5
#SBATCH --open-mode=append
#SBATCH --output=/sweeps/s/batches/train.0123456789-5.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8

set -- srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 /venv/bin/python -P -m safelaunch --nnodes=2 '--rdzv-id=@{job-id}' --rdzv-backend=c10d '--rdzv-endpoint=@{first-host}:@{rdzv-port}' --run-name wide --bundle-dir /sweeps/s/jobs/wide/bundles --nproc-per-node=8 t.py '@{port-0}'
exec /venv/bin/python -P -m the.task /sweeps/s/jobs/wide 1 --cwd '/srv/it'"'"'s' --ports 1 -- "$@"
