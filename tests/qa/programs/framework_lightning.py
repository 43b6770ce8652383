"""Lightning's Trainer with DDP. ``--how gather``: ``self.all_gather`` under ``if self.global_rank == 0``."""

import argparse
import time

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="")
parser.add_argument("--culprit", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--scratch", default=".")
words = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        time.sleep(0.02)
        if self.global_step == 12 and self.global_rank == words.culprit:
            self.report(loss)
        return loss

    def report(self, loss):
        if words.how == "gather":
            self.all_gather(loss.detach())  # HANGS: gather
        elif words.how == "asleep":
            time.sleep(3600)  # HANGS: asleep

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.log("val", torch.nn.functional.mse_loss(self.layers(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    data = TensorDataset(torch.randn(2000, 8), torch.randn(2000, 1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=words.steps,
        val_check_interval=10,
        limit_val_batches=4,
        default_root_dir=words.scratch,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))


if __name__ == "__main__":
    main()
