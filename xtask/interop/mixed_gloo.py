"""One of two ranks of a gloo group, the other being Phalanx's.

    python3 mixed_gloo.py PATH RANK

The other one is `cargo run -p phalanx-gloo --example with_pytorch PATH RANK`, which makes the same
calls in the same order. For PyTorch 1.13 from Debian, which links the system's libgloo. They meet
in a FileStore at PATH.
"""

import datetime
import sys

import torch
import torch.distributed as dist

SIZE, LONG = 2, 1_000_003


def numbers(rank, length):
    return (torch.arange(length) % 89 + 1000 * rank).to(torch.float32)


def main(path, rank):
    store = dist.FileStore(path, SIZE)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=limit)
    other = 1 - rank
    for length in (1, 1000, LONG):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.float16):
            at = torch.arange(length) % 97
            t = (at * (rank + 1)).to(dtype)
            dist.all_reduce(t)
            assert torch.equal(t, (at * 3).to(dtype)), (length, dtype)
    t = torch.full((5,), rank, dtype=torch.int32)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    assert torch.equal(t, torch.ones(5, dtype=torch.int32)), t
    for root in range(SIZE):
        t = numbers(rank, 1000)
        dist.broadcast(t, root)
        assert torch.equal(t, numbers(root, 1000)), root
    parts = [torch.zeros(300) for _ in range(SIZE)]
    dist.all_gather(parts, numbers(rank, 300))
    assert all(torch.equal(part, numbers(r, 300)) for r, part in enumerate(parts))
    dist.barrier()
    sent = dist.isend(numbers(rank, LONG), other, tag=5)
    t = torch.zeros(LONG)
    dist.recv(t, other, tag=5)
    assert torch.equal(t, numbers(other, LONG))
    sent.wait()
    # The other side ends its group with one.
    dist.barrier()
    print(f"pytorch {torch.__version__} rank {rank} of {SIZE}: everything agrees", flush=True)


main(sys.argv[1], int(sys.argv[2]))
