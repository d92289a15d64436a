"""PyTorch's gloo all-reduce, measured as `phalanx bench allreduce` measures its own backends.

See rank.rs for what happens in a window and window.rs for the lines of the conversation.
Arguments: SOCKET [PROCESSOR,PROCESSOR,...]; rank, size and where to meet are in the environment.
"""

import os
import socket
import sys
import time

rank = int(os.environ["RANK"])
size = int(os.environ["WORLD_SIZE"])
if len(sys.argv) > 2 and sys.argv[2]:
    os.sched_setaffinity(0, {int(sys.argv[2].split(",")[rank])})

import torch
import torch.distributed as dist

PERIOD = 5
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def window(nbytes, dtype, iters, warmup, barrier, batch):
    dtype = DTYPES[dtype]
    length = nbytes // dtype.itemsize
    ranks = size * (size + 1) // 2
    ones = torch.arange(length) % PERIOD + 1
    data = (ones * (rank + 1)).to(dtype)
    dist.all_reduce(data)
    wrong = int((data != (ones * ranks).to(dtype)).sum())
    del ones
    times = []
    for i in range(warmup + iters):
        one = i % PERIOD + 1
        data.fill_(one * (rank + 1))
        if barrier:
            dist.barrier()
        if i % batch == 0:
            start = time.perf_counter_ns()
        dist.all_reduce(data)
        if i >= warmup and (i + 1) % batch == 0:
            times.append((time.perf_counter_ns() - start) // batch)
        for at in (0, length // 2, length - 1, i * 7919 % length):
            wrong += data[at].item() != one * ranks
    return f"done {wrong} {' '.join(map(str, times))}\n"


torch.set_num_threads(1)
with torch.no_grad(), socket.socket(socket.AF_UNIX) as bench:
    bench.connect(sys.argv[1])
    lines = bench.makefile("rw")
    try:
        dist.init_process_group("gloo")
        lines.write(f"hello {rank} gloo of PyTorch {torch.__version__}\n")
        lines.flush()
        for line in lines:
            _, nbytes, dtype, _, iters, warmup, barrier, batch = line.split()
            answer = window(int(nbytes), dtype, int(iters), int(warmup), barrier == "1", int(batch))
            lines.write(answer)
            lines.flush()
    except Exception as error:
        text = " ".join(str(error).split())
        lines.write(f"fail {text}\n")
        lines.flush()
        raise
