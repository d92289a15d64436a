"""Writes what PyTorch's DistributedDataParallel does with small models, as JSON.

Run with PyTorch 2.13: `python make.py`. Writes `ddp_2.json`, `ddp_4.json` (gloo, so many processes
on this machine) and `sampler.json` next to itself. The tests of this crate replay them.
"""

import json
import os
import random
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.parallel.distributed as ddp_module
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 5
BATCH = 3

MLP = [["linear", "fc1", 6, 8], ["relu"], ["linear", "fc2", 8, 5], ["relu"], ["linear", "fc3", 5, 3]]
NORM = [["linear", "fc1", 6, 8], ["batch_norm", "bn", 8], ["relu"], ["linear", "fc2", 8, 3]]
BRANCHES = [
    ["linear", "fc1", 6, 8],
    ["relu"],
    ["branch", "extra", 8],
    ["branch", "never", 8],
    ["linear", "fc2", 8, 3],
]
SMALL = {"bucket_cap_mb": 0.0001}


def bag(mode):
    return [["embedding_bag", "table", 12, 6, mode], ["linear", "fc1", 6, 5], ["relu"], ["linear", "fc2", 5, 3]]


def cases(world):
    uneven = [5, 3, 1, 4][:world]
    yield {"name": "default", "net": MLP}
    yield {"name": "small_buckets", "net": MLP, "config": SMALL}
    yield {"name": "cap_list", "net": MLP, "config": {"bucket_cap_mb_list": [0.00005, 0.0002]}}
    yield {"name": "view", "net": MLP, "config": {**SMALL, "gradient_as_bucket_view": True}}
    yield {"name": "momentum", "net": MLP, "momentum": 0.9}
    yield {"name": "static_graph", "net": MLP, "config": {**SMALL, "static_graph": True}}
    yield {"name": "no_sync", "net": MLP, "config": SMALL, "micro": 2}
    yield {"name": "no_sync_view", "net": MLP, "config": {**SMALL, "gradient_as_bucket_view": True}, "micro": 3}
    yield {"name": "join_initial", "net": MLP, "config": SMALL, "join": "initial", "steps": uneven}
    yield {"name": "join_effective", "net": MLP, "config": SMALL, "join": "effective", "steps": uneven}
    yield {"name": "buffers", "net": NORM}
    yield {"name": "buffers_unsynced", "net": NORM, "config": {"forward_sync_buffers": False}}
    yield {"name": "buffers_join", "net": NORM, "join": "initial", "steps": uneven}
    yield {"name": "unused", "net": BRANCHES, "config": {**SMALL, "find_unused_parameters": True}, "branches": True}
    yield {"name": "unused_default_caps", "net": BRANCHES, "config": {"find_unused_parameters": True}, "branches": True}
    yield {"name": "static_unused", "net": BRANCHES, "config": {**SMALL, "static_graph": True}}
    yield {"name": "sparse_mean", "net": bag("mean")}
    yield {"name": "sparse_sum_view", "net": bag("sum"), "config": {**SMALL, "gradient_as_bucket_view": True}}
    yield {"name": "hook_allreduce", "net": MLP, "config": SMALL, "hook": "allreduce"}
    yield {"name": "hook_fp16", "net": MLP, "config": SMALL, "hook": "fp16_compress"}
    yield {"name": "hook_bf16", "net": MLP, "config": SMALL, "hook": "bf16_compress"}


class Net(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.spec = layers
        self.active = {layer[1]: layer[1] != "never" for layer in layers if layer[0] == "branch"}
        for kind, *args in layers:
            if kind == "linear":
                setattr(self, args[0], torch.nn.Linear(args[1], args[2]))
            elif kind == "branch":
                setattr(self, args[0], torch.nn.Linear(args[1], args[1]))
            elif kind == "batch_norm":
                setattr(self, args[0], torch.nn.BatchNorm1d(args[1]))
            elif kind == "embedding_bag":
                setattr(self, args[0], torch.nn.EmbeddingBag(args[1], args[2], mode=args[3], sparse=True))

    def forward(self, *inputs):
        x = inputs[0]
        for kind, *args in self.spec:
            if kind == "relu":
                x = torch.relu(x)
            elif kind == "branch":
                x = x + getattr(self, args[0])(x) if self.active[args[0]] else x
            elif kind == "embedding_bag":
                x = getattr(self, args[0])(*inputs)
            else:
                x = getattr(self, args[0])(x)
        return x


def numbers(tensor):
    if tensor is None:
        return None
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return [float(f"{value:.9g}") for value in tensor.detach().flatten().tolist()]


def batch(rng, case):
    targets = [rng.randrange(3) for _ in range(BATCH)]
    if case["net"][0][0] == "embedding_bag":
        bags = [[rng.randrange(12) for _ in range(rng.randint(1, 3))] for _ in range(BATCH)]
        return {"bags": bags, "targets": targets}
    x = [[round(rng.uniform(-1, 1), 2) for _ in range(6)] for _ in range(BATCH)]
    return {"x": x, "targets": targets}


def inputs(data):
    if "x" in data:
        return [torch.tensor(data["x"])]
    offsets, indices = [], []
    for one in data["bags"]:
        offsets.append(len(indices))
        indices += one
    return [torch.tensor(indices), torch.tensor(offsets)]


def run(case, rank, world):
    config = case.setdefault("config", {})
    micro, steps = case.setdefault("micro", 1), case.setdefault("steps", [STEPS] * world)
    rng = random.Random(case["name"])
    net = Net(case["net"])
    with torch.no_grad():
        for parameter in net.parameters():
            values = [round(rng.uniform(-0.5, 0.5), 3) for _ in range(parameter.numel())]
            parameter.copy_(torch.tensor(values).view_as(parameter))
    case["initial"] = {name: numbers(p) for name, p in net.named_parameters()}
    case["data"] = [[[batch(rng, case) for _ in range(micro)] for _ in range(steps[r])] for r in range(world)]
    # Which branches are on, by rank and step.
    case["active"] = [[(r + s) % 2 == 0 for s in range(steps[r])] for r in range(world)] if case.pop("branches", None) else None

    layouts = []
    reducer = dist.Reducer

    def recording(parameters, buckets, *args):
        layouts.append(buckets)
        return reducer(parameters, buckets, *args)

    ddp_module.dist.Reducer = recording
    model = DistributedDataParallel(net, **config)
    ddp_module.dist.Reducer = reducer
    hooks = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16_compress": default_hooks.fp16_compress_hook,
        "bf16_compress": default_hooks.bf16_compress_hook,
    }
    if "hook" in case:
        model.register_comm_hook(None, hooks[case["hook"]])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=case.setdefault("momentum", 0.0))
    grads = []

    def step(s):
        if case["active"]:
            net.active["extra"] = case["active"][rank][s]
        optimizer.zero_grad()
        for m, data in enumerate(case["data"][rank][s]):
            synchronized = m + 1 == micro
            loss = torch.nn.functional.cross_entropy
            if synchronized:
                loss(model(*inputs(data)), torch.tensor(data["targets"])).backward()
            else:
                with model.no_sync():
                    loss(model(*inputs(data)), torch.tensor(data["targets"])).backward()
        if s in (0, steps[rank] - 1):
            grads.append({name: numbers(p.grad) for name, p in net.named_parameters()})
        optimizer.step()

    if "join" in case:
        with model.join(divide_by_initial_world_size=case["join"] == "initial"):
            for s in range(steps[rank]):
                step(s)
    else:
        for s in range(steps[rank]):
            step(s)

    log = model._get_ddp_logging_data()

    def lists(text):
        return [[int(n) for n in part.split()] for part in text.split(",")] if text else []

    case["expect"] = {
        "initial_layout": layouts[0],
        "bucket_sizes": [int(n) for n in log["bucket_sizes"].split(", ")],
        "rebuilt": lists(log.get("rebuilt_per_bucket_param_indices", "")),
        "ready_order": sum(lists(log.get("prev_iteration_grad_ready_order_indices", "")), []),
        # Of rank 0's first and last step.
        "grads": grads,
        "parameters": {name: numbers(p) for name, p in net.named_parameters()},
        "buffers": {name: numbers(b) for name, b in net.named_buffers()},
    }
    ends = [None] * world
    dist.all_gather_object(ends, case["expect"]["parameters"])
    assert all(end == ends[0] for end in ends), "replicas differ"
    return case


def rank_main(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    done = [run(case, rank, world) for case in cases(world)]
    if rank == 0:
        lines = ",\n".join(json.dumps(case) for case in done)
        with open(os.path.join(HERE, f"ddp_{world}.json"), "w") as file:
            file.write(f'{{"torch": "{torch.__version__}", "world": {world}, "cases": [\n{lines}\n]}}\n')
    dist.barrier()
    dist.destroy_process_group()


def sampler():
    permutations = []
    for n in [0, 1, 2, 10, 37, 1000, 100000]:
        for seed in [0, 1, 42, 2**31, 2**32 + 5]:
            generator = torch.Generator()
            generator.manual_seed(seed)
            items = torch.randperm(n, generator=generator).tolist()
            # A long one is known by its ends and a checksum.
            total = sum((i + 1) * item for i, item in enumerate(items)) % 1000003
            permutations.append({"n": n, "seed": seed, "head": items[:12], "tail": items[-3:], "sum": total})
    shares = []
    for n, world in [(10, 4), (12, 4), (3, 4), (1, 3), (7, 2), (100, 8)]:
        for drop_last in [False, True]:
            for shuffle in [False, True]:
                for rank in range(world):
                    s = DistributedSampler(range(n), world, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
                    s.set_epoch(5)
                    share = {"n": n, "world": world, "rank": rank, "shuffle": shuffle, "drop_last": drop_last}
                    shares.append({**share, "seed": 3, "epoch": 5, "num_samples": len(s), "indices": list(s)})
    with open(os.path.join(HERE, "sampler.json"), "w") as file:
        lines = ",\n".join(json.dumps(one) for one in permutations)
        file.write(f'{{"torch": "{torch.__version__}", "permutations": [\n{lines}\n],\n')
        lines = ",\n".join(json.dumps(one) for one in shares)
        file.write(f'"shares": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sampler()
    for world, port in [(2, 29617), (4, 29619)]:
        mp.spawn(rank_main, args=(world, port), nprocs=world)
    sys.exit(0)
