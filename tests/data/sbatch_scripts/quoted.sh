# sbatch --parsable --job-name=train.0123456789-5 --open-mode=append --output=100%% --nodes=1 --ntasks-per-node=1 PLACE
#!/bin/bash
export NAME='it'"'"'s $HOME `x`
'
export CUDA_VISIBLE_DEVICES=''
exec /venv/bin/python -P -m the.task slurm train.0123456789-5 /sweeps/s/jobs/lr-1 1 --cwd '/srv/it'"'"'s' -- /venv/bin/python -P -m safelaunch exec --run-name lr-1 --bundle-dir /sweeps/s/jobs/lr-1/bundles -- python t.py --lr 1
