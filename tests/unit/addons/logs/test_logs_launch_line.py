"""A line of a job's output that shows how the job was started, and the same job under safelaunch."""

from __future__ import annotations

import random
import shlex

import pytest

from safelaunch.addons.logs.launch_line import best_launch, launch_of

RUNNER = "[2026-01-01 10:00:00,000] [INFO] [runner.py:570:main] cmd"
OF_DEEPSPEED = "/usr/bin/python3 -u -m deepspeed.launcher.launch --world_info=eyJsb2NhbGhvc3QiOiBbMF19 train.py --x 1"
CALLED = "subprocess.CalledProcessError: Command '"

# The line, and what to type; of a command that safelaunch only stands in front of, "exec" and "each rank".
LAUNCHES = [
    # torchrun: its options are safelaunch's
    ("torchrun --nproc_per_node=8 train.py --lr 1e-3", "safelaunch --nproc_per_node=8 train.py --lr 1e-3"),
    ("torchrun --nproc_per_node 8 -m pkg.train --x 'a b'", "safelaunch --nproc_per_node 8 -m pkg.train --x 'a b'"),
    ("torchrun --no-python --nproc-per-node=2 sh -c 'python -m x'",
     "safelaunch --no-python --nproc-per-node=2 sh -c 'python -m x'"),
    ("/opt/conda/bin/torchrun --standalone train.py", "safelaunch --standalone train.py"),
    ("python -m torch.distributed.run --nnodes=2 train.py", "safelaunch --nnodes=2 train.py"),
    ("/usr/bin/python3.11 -u -m torch.distributed.run --nnodes=2 train.py", "safelaunch --nnodes=2 train.py"),
    ("/usr/bin/python3 /opt/conda/bin/torchrun --nnodes=2 train.py", "safelaunch --nnodes=2 train.py"),
    ("python -m torch.distributed.launch --use_env --nnodes=2 main.py", "safelaunch --nnodes=2 main.py"),
    ("python -m torch.distributed.launch --nnodes=2 --use-env main.py", "safelaunch --nnodes=2 main.py"),
    ("safelaunch --nproc-per-node=8 train.py", "safelaunch --nproc-per-node=8 train.py"),
    # other launchers, and scripts that start their ranks: unchanged, under exec
    ("python -m torch.distributed.launch --nproc_per_node=8 main.py", "exec"),
    ("accelerate launch --config_file a.yaml train.py --bs 4", "exec"),
    ("accelerate launch --num_processes 8 -m pkg.train", "exec"),
    ("deepspeed --num_gpus=8 train.py --deepspeed ds.json", "exec"),
    ("horovodrun -np 4 python train.py", "exec"),
    ("mpirun -np 8 python train.py", "exec"),
    ("python -u train.py --gpus 8", "exec"),
    ("python -m pkg.train --gpus 8", "exec"),
    # a safelaunch for each task of srun, and on each host of mpirun
    ("srun -N 2 --ntasks=16 python train.py", "srun -N 2 --ntasks=16 | python train.py"),
    ("srun -N 2 accelerate launch train.py", "srun -N 2 | accelerate launch train.py"),
    ("mpirun -H a:4,b:4 -x MASTER_ADDR python3 train.py", "mpirun -H a:4,b:4 -x MASTER_ADDR | python3 train.py"),
    ("mpirun --hostfile hosts -np 8 python train.py",
     "mpirun --hostfile hosts -np 8 safelaunch exec --cluster-store=HOST:29700 -- python train.py"),
    ("srun -N 2 torchrun --nnodes 2 train.py", "srun -N 2 safelaunch --nnodes 2 train.py"),
    # what stands around them stays
    ("CUDA_VISIBLE_DEVICES=0,1 A=b torchrun train.py", "CUDA_VISIBLE_DEVICES=0,1 A=b safelaunch train.py"),
    ("nohup torchrun train.py > out.log 2>&1 &", "nohup safelaunch train.py"),
    ("uv run torchrun train.py", "uv run safelaunch train.py"),
    ("docker run --rm --gpus all image torchrun train.py", "docker run --rm --gpus all image safelaunch train.py"),
    ("cd /work && torchrun train.py; echo done", "safelaunch train.py"),
    ("torchrun train.py --eos '<s>' 2>&1 | tee log.txt", "safelaunch train.py --eos '<s>'"),
    ("torchrun --nproc_per_node=8 \\\n  train.py \\\n  --x 1", "safelaunch --nproc_per_node=8 train.py --x 1"),
    ("torchrun train.py # with 8 ranks", "safelaunch train.py"),
    # where a line shows them
    ("$ torchrun train.py", "safelaunch train.py"),
    ("# torchrun train.py", "safelaunch train.py"),
    ("me@node1:~/work$ torchrun train.py", "safelaunch train.py"),
    ("(base) [me@node1 work]$ torchrun train.py", "safelaunch train.py"),
    ("root@3f2:/workspace# torchrun train.py", "safelaunch train.py"),
    ("+ torchrun train.py '--name=a b'", "safelaunch train.py '--name=a b'"),
    ("++ torchrun train.py", "safelaunch train.py"),
    ("Running command: torchrun train.py", "safelaunch train.py"),
    ("Command: `torchrun train.py`", "safelaunch train.py"),
    ("2: Executing torchrun train.py", "safelaunch train.py"),
    ('    args: ["torchrun", "--nproc_per_node=8", "train.py"]', "safelaunch --nproc_per_node=8 train.py"),
    ('"command":["python","-m","torch.distributed.run","train.py"],', "safelaunch train.py"),
    (f"{CALLED}['torchrun', '--x=2', 'train.py']' returned non-zero exit status 1.", "safelaunch --x=2 train.py"),
    (f"{CALLED}['/bin/python', 'train.py', '--x=a b']' returned non-zero exit status 1.",
     "safelaunch exec -- /bin/python train.py '--x=a b'"),
    (f"{RUNNER} = {OF_DEEPSPEED}", f"safelaunch exec -- {OF_DEEPSPEED}"),
    (f"{RUNNER} = {OF_DEEPSPEED.split()}", f"safelaunch exec -- {OF_DEEPSPEED}"),
]  # fmt: skip


def expected(line: str, shown: str) -> list[str]:
    if shown == "exec":
        return ["safelaunch", "exec", "--", *shlex.split(line)]
    around, mark, command = shown.partition(" | ")
    inner = f"{around} safelaunch exec --cluster-store=29700 -- {command}" if mark else shown
    return shlex.split(inner)


@pytest.mark.parametrize(("line", "shown"), LAUNCHES)
def test_launch_line_becomes_the_command_under_safelaunch(line: str, shown: str) -> None:
    assert list(launch_of(line)) == expected(line, shown)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 12 loss 0.3 lr 0.1",
        "torchrun is slower than train.py",
        "usage: torchrun [-h] [--nnodes NNODES] training_script.py ...",
        "torchrun: error: unrecognized arguments: train.py",
        "torchrun --help train.py",
        "Try running python train.py --help",
        '  File "/opt/conda/bin/torchrun", line 8, in <module>',
        '  File "/job/train.py", line 8, in main -m ',
        "    sys.exit(main())  # train.py",
        "/torch/distributed/launch.py:181: FutureWarning: The module torch.distributed.launch is deprecated",
        "srun: error: node1: task 0: Exited with exit code 1 train.py",
        "WARNING:torch.distributed.run: train.py",
        "train.py FAILED",
        "Use torchrun or python -m torch.distributed.run instead",
        "safelaunch: the job hangs: busy-loop train.py",
        "safelaunch reproduce safelaunch-bundles/latest -o train.py",
        "+ python -m pip install -r requirements.txt",
        "+ python -m json.tool x.json",
        # one rank's own command
        "[INFO] [launch.py:253:main] process 7 spawned with command: ['python', '-u', 'train.py', '--local_rank=0']",
        f"{CALLED}['/bin/python', '-u', 'train.py', '--local-rank', '3']' returned non-zero exit status 1.",
        # of other nodes; not whole; with what only the shell knew
        f"{RUNNER} = pdsh -S -f 1024 -w a,b cd /x; {OF_DEEPSPEED.replace('python3', 'python3x')}",
        "torchrun --nproc_per_node=8 train.py \\",
        "torchrun train.py --name 'not closed",
        "torchrun --rdzv-endpoint=$(hostname):29500 train.py",
        "torchrun --rdzv-endpoint=`hostname`:29500 train.py",
        f"{CALLED}['torchrun', 'train.py",
        "torchrun " + "x" * 20000 + " train.py",
    ],
)
def test_line_without_a_launch_gives_nothing(line: str) -> None:
    assert launch_of(line) == ()


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["+ python prepare.py", "+ torchrun train.py", "+ python after.py"], "safelaunch train.py"),
        (["+ python prepare.py", "step 1", "+ python -u train.py"], "safelaunch exec -- python -u train.py"),
        (["$ deepspeed train.py", f"{RUNNER} = {OF_DEEPSPEED}"], "safelaunch exec -- deepspeed train.py"),
        ([f"{RUNNER} = {OF_DEEPSPEED}", f"{CALLED}['python', 'train.py']'"], f"safelaunch exec -- {OF_DEEPSPEED}"),
        (["+ srun python train.py", "+ srun accelerate launch train.py"],
         "srun safelaunch exec --cluster-store=29700 -- accelerate launch train.py"),
        (["step 1", "step 2"], ""),
    ],
)  # fmt: skip
def test_best_launch_is_first_launcher_or_last_script(lines: list[str], shown: str) -> None:
    launch: tuple[str, ...] = ()
    for line in lines:
        launch = best_launch(launch, line)
    assert shlex.join(launch) == shown


def test_any_line_is_read_without_an_error() -> None:
    words = [
        "torchrun",
        "python",
        "-m",
        " ",
        "'",
        '"',
        "[",
        "]",
        "a=b ",
        "train.py",
        "$",
        "#",
        "%",
        ">",
        "cmd",
        "=",
        "|",
    ]
    words += [
        "\\",
        "srun",
        "/",
        "(",
        ")",
        "\n",
        ":",
        "é",
        "\0",
        ", ",
        "exec ",
        "mpirun -H ",
        "--",
        "`",
        "&&",
        ";",
        "safelaunch ",
    ]
    drawn = random.Random(46)
    for _ in range(20_000):
        launch_of("".join(drawn.choices(words, k=drawn.randint(1, 30))))
