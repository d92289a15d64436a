"""What PyTorch's DDP on gloo adds to a backward of no work; one rank."""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rounds, view = int(sys.argv[1]), sys.argv[2] == "true"
lens = json.loads(os.environ["BENCH_LENS"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
torch.set_num_threads(1)


def value(r, slot, n):
    return 1.0 + r * 0.25 + (slot % 97) * 0.5 + n % 13


class Fresh(torch.autograd.Function):
    """Chains parameters, so that backward reaches them one by one; each gradient is new memory."""

    @staticmethod
    def forward(ctx, x, parameter, slot, n):
        ctx.args = (parameter.shape, slot, n)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        shape, slot, n = ctx.args
        return grad, torch.full(shape, value(rank, slot, n)), None, None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.list = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n)) for n in lens])

    def forward(self, x, n):
        for slot, parameter in enumerate(self.list):
            x = Fresh.apply(x, parameter, slot, n)
        return x


model = Model()
ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
verified = True


def once(module, n):
    model.zero_grad(set_to_none=True)
    out = module(torch.zeros(1, requires_grad=True), n).sum()
    dist.barrier()
    start = time.perf_counter()
    out.backward()
    return (time.perf_counter() - start) * 1e3


local, both = [], []
for n in range(3 + rounds):
    alone, synchronised = once(model, n), once(ddp, n)
    for slot, parameter in enumerate(model.list):
        expected = sum(value(r, slot, n) for r in range(world)) / world
        verified = verified and bool(((parameter.grad - expected).abs() <= 1e-6 * expected).all())
    if n >= 3:
        local.append(alone)
        both.append(synchronised)

dist.barrier()
dist.destroy_process_group()
figures = {"local_ms": statistics.median(local), "ddp_ms": statistics.median(both), "floor_ms": 0.0}
print(json.dumps({**figures, "verified": verified}))
