"""A tiny model under DistributedDataParallel, started by `phalanx run --no-token`.

With --fail-before N, rank 1 ends badly in every attempt before the Nth.
"""

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    rank = int(os.environ["RANK"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2 and dist.get_rank() == rank
    if "--fail-before" in sys.argv:
        if rank == 1 and attempt < int(sys.argv[sys.argv.index("--fail-before") + 1]):
            sys.exit(3)
        # The other rank is in a collective then, and stopped there.
        dist.barrier()
    torch.manual_seed(rank)  # different on purpose: DDP broadcasts rank 0's
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(20):
        inputs = torch.full((8, 4), float(rank + 1) / (step + 1))
        loss = (model(inputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.zeros_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    assert torch.equal(both[0], both[1]), "the replicas differ"
    assert losses[-1] < losses[0], losses
    print(f"rank {rank} trained, attempt {attempt}, replicas equal", flush=True)
    # PyTorch may end with "terminate called without an active exception" on a busy machine, under
    # any launcher, if a DDP model outlives its group.
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


main()
