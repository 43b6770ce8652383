"""A training loop in the style of accelerate's examples. ``--how gather``: one rank gathers its metrics alone."""

import argparse
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="")
parser.add_argument("--culprit", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--scratch", default=".")
words = parser.parse_args()


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(TensorDataset(torch.randn(2000, 8), torch.randn(2000, 1)), batch_size=8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    for step, (inputs, targets) in enumerate(data, 1):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        time.sleep(0.02)
        if step == 24 and accelerator.process_index == words.culprit:
            if words.how == "gather":
                accelerator.gather_for_metrics(loss)  # HANGS: gather
            elif words.how == "asleep":
                time.sleep(3600)  # HANGS: asleep
        if step == 2 * words.steps:
            break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{words.scratch}/model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
