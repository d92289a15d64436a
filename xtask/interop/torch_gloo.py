"""One rank of a PyTorch gloo group that meets through a Phalanx store (RANK, WORLD_SIZE, ... set)."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
t = torch.tensor([float(rank + 1)])
dist.all_reduce(t)
assert t.item() == size * (size + 1) / 2, t
pair = dist.new_group(list(range(size)))
dist.all_reduce(t, group=pair)
assert t.item() == size * size * (size + 1) / 2, t
dist.monitored_barrier()
dist.destroy_process_group()
print(f"rank {rank} of {size}: all_reduce agrees", flush=True)
