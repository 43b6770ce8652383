"""transformers.Trainer with a tiny, randomly initialised GPT-2. ``--how barrier``: a callback calls a barrier on one rank."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="")
parser.add_argument("--culprit", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--scratch", default=".")
words = parser.parse_args()


class Tokens(Dataset):
    served = 0

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        self.served += 1
        if words.how == "loader" and self.served > 96 and dist.get_rank() == words.culprit:
            time.sleep(3600)  # HANGS: loader
        return {"input_ids": tokens, "labels": tokens}


class Log(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if words.how and state.global_step == 12 and args.process_index == words.culprit:
            self.upload()

    def upload(self) -> None:
        if words.how == "barrier":
            dist.barrier()  # HANGS: barrier
        elif words.how == "asleep":
            time.sleep(3600)  # HANGS: asleep


config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
arguments = TrainingArguments(
    output_dir=f"{words.scratch}/out",
    use_cpu=True,
    ddp_backend="gloo",
    max_steps=words.steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    save_steps=20,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=10,
    report_to="none",
    disable_tqdm=True,
    dataloader_num_workers=1 if words.how == "loader" else 0,
)
evaluation = torch.utils.data.Subset(Tokens(), range(16))
trainer = Trainer(
    model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens(), eval_dataset=evaluation, callbacks=[Log()]
)
trainer.train()
trainer.save_model(f"{words.scratch}/model")
