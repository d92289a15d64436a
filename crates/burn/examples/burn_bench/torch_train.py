"""One rank of PyTorch's side of `burn_bench`: seconds per step, with DDP on gloo if there are others."""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

name, steps, warm_up = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)

    def forward(self, x):
        return self.blocks(x)


def cross_entropy(out):
    return nn.functional.cross_entropy(out, torch.arange(len(out)) % 10)


models = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        ),
        lambda: torch.randn(64, 784),
        cross_entropy,
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 49, 10),
        ),
        lambda: torch.randn(64, 1, 28, 28),
        cross_entropy,
    ),
    "encoder": (Encoder, lambda: torch.randn(8, 64, 256), lambda out: out.square().mean()),
}
make, batch, criterion = models[name]
model = make()
if world > 1:
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
optim = torch.optim.SGD(model.parameters(), lr=0.001)
times = []
for step in range(warm_up + steps):
    start = time.perf_counter()
    optim.zero_grad(set_to_none=True)
    criterion(model(batch())).backward()
    optim.step()
    if step >= warm_up:
        times.append(time.perf_counter() - start)
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
print(json.dumps(statistics.median(times)))
