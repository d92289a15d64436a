"""Writes plan.json: what PyTorch's bucket assignment answers for many small cases.

Run with PyTorch 2.13: `python plan.py > plan.json`. The test `plan.rs` compares.
"""

import json
import random

import torch
import torch.distributed as dist

DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16}


def case(sizes, dtypes, sparse, limits, order):
    tensors = [torch.empty(n, dtype=DTYPES[d]) for n, d in zip(sizes, dtypes)]
    if order is None:
        answer = dist._compute_bucket_assignment_by_size(tensors, limits, sparse)
    else:
        listed = [tensors[i] for i in order]
        answer = dist._compute_bucket_assignment_by_size(listed, limits, sparse, order)
    buckets, per_bucket = answer
    return {
        "sizes": sizes,
        "dtypes": dtypes,
        "sparse": sparse,
        "limits": limits,
        "order": order,
        "buckets": buckets,
        "bucket_limits": per_bucket,
    }


def main():
    f32 = lambda n: ["f32"] * n
    no = lambda n: [False] * n
    cases = [
        case([10] * 7, f32(7), no(7), [40, 80], None),
        case([100, 50] * 2, ["f32", "f64"] * 2, no(4), [400], None),
        case([5] * 4, f32(4), [False, True, False, True], [1 << 20], None),
        case([1, 1000, 1], f32(3), no(3), [100], None),
    ]
    rng = random.Random(13)
    for _ in range(120):
        n = rng.randint(1, 12)
        mixed = rng.random() < 0.5
        cases.append(
            case(
                [rng.choice([1, 3, 10, 40, 100]) for _ in range(n)],
                [rng.choice(list(DTYPES)) if mixed else "f32" for _ in range(n)],
                [rng.random() < 0.15 for _ in range(n)],
                [rng.choice([1, 40, 100, 400, 4000]) for _ in range(rng.randint(1, 3))],
                rng.sample(range(n), n) if rng.random() < 0.5 else None,
            )
        )
    lines = ",\n".join(json.dumps(case) for case in cases)
    print(f'{{"torch": "{torch.__version__}", "cases": [\n{lines}\n]}}')


main()
