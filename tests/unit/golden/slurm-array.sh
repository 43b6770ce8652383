# sbatch --parsable PLACE
#!/bin/bash
#SBATCH --job-name=train.0123456789-5
#SBATCH --open-mode=append
#SBATCH --output=/sweeps/s/batches/train.0123456789-5.out.%a
#SBATCH --array=0-1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1

case $SLURM_ARRAY_TASK_ID in
0)
  export NAME='it'"'"'s $HOME'
  export CUDA_VISIBLE_DEVICES=''
  set -- /venv/bin/python -P -m safelaunch exec --run-name lr-1 --bundle-dir /sweeps/s/jobs/lr-1/bundles -- python t.py --lr 1
  exec /venv/bin/python -P -m the.task /sweeps/s/jobs/lr-1 1 --cwd '/srv/it'"'"'s' -- "$@"
  ;;
1)
  export NAME='`x`
'
  export CUDA_VISIBLE_DEVICES=''
  set -- /venv/bin/python -P -m safelaunch exec --run-name lr-2 --bundle-dir /sweeps/s/jobs/lr-2/bundles -- python t.py --lr 2
  exec /venv/bin/python -P -m the.task /sweeps/s/jobs/lr-2 1 --cwd '/srv/it'"'"'s' -- "$@"
  ;;
esac
