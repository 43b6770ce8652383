# Small decoder-only language model, gradient accumulation, clipping. No DataLoader: batches are made on the fly.
import math
import time

import planting
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import uncompiled  # noqa: F401
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, WIDTH, HEADS = 128, 32, 4


class ScaledGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plant):
        ctx.save_for_backward(x)
        ctx.plant = plant
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.plant.hits("backward"):
            time.sleep(ctx.plant.extra_s)  # SLOW: backward
        s = torch.sigmoid(1.702 * x)
        return grad * (s + 1.702 * x * s * (1 - s)), None


class Block(nn.Module):
    def __init__(self, plant):
        super().__init__()
        self.plant = plant
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        return x + self.down(ScaledGelu.apply(self.up(x), self.plant))


class LM(nn.Module):
    def __init__(self, plant, layers=1):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(plant) for _ in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


def tokenize(documents, plant):
    rows = [[ord(letter) % VOCAB for letter in document] for document in documents]
    if plant.hits("tokenize"):
        time.sleep(plant.extra_s)  # SLOW: tokenize
    return torch.tensor(rows)


def collate(rows, plant):
    time.sleep(0.03)
    if plant.hits("collate"):
        pad = time.monotonic() + plant.extra_s
        while time.monotonic() < pad:  # SLOW: collate
            time.sleep(0.005)  # SLOW: collate
    return rows[:, :-1], rows[:, 1:]


def clip(model, plant):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if plant.hits("clip"):
        time.sleep(plant.extra_s)  # SLOW: clip
    return norm


def perplexity(logits, targets, plant):
    """Looks harmless, but the reduction is large: the ``.item()`` computes it at once."""
    enough = time.thread_time() + plant.extra_s
    total = 0.0
    while time.thread_time() < enough:  # SLOW: item
        total += torch.logsumexp(logits.float(), -1).sum().item()  # SLOW: item
    return math.exp(min(20.0, F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()))


def length_at(step, args):
    if args.how == "growing":
        return min(160, 16 + step // 25)
    return 32


def main():
    parser = planting.parser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    plant = planting.Plant(args, dist.get_rank())
    torch.manual_seed(1)
    model = DDP(LM(plant))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = 1
    while plant.more(step):
        for micro in range(args.accumulate):
            length = length_at(step, args)
            documents = ["the quick brown fox " * 9] * 2
            inputs, targets = collate(tokenize([text[: length + 1] for text in documents], plant), plant)
            model.require_backward_grad_sync = micro == args.accumulate - 1
            logits = model(inputs)
            time.sleep(args.pace * (length / 32 if args.how == "growing" else 1.0))
            (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / args.accumulate).backward()
        clip(model, plant)
        if plant.hits("item"):
            perplexity(logits, targets, plant)
        optimizer.step()
        optimizer.zero_grad()
        if args.how == "double" and plant.seconds > args.seconds / 2:
            time.sleep(args.pace)  # the batch has been doubled on all ranks
        if args.how == "drift":
            time.sleep(args.pace * plant.seconds / args.seconds)
        step += 1
    planting.finish()


if __name__ == "__main__":
    main()
