"""Run by the engine image's own Python, as one process a node: how fast an all-gather of small buffers is.

Only torch and the standard library are here: the image does not have this package. It takes RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT as torch does, and prints one line.
"""

import datetime
import json
import os
import time

import torch
import torch.distributed as dist

MARK = "GLM53-ALLGATHER "
WARM_UP = 3


def main() -> None:
    """Gather, check what arrived, and print size, seconds a round and bus bandwidth (bytes x (n-1)/n)."""
    backend, size, rounds = os.environ["BACKEND"], int(os.environ["BYTES"]), int(os.environ["ROUNDS"])
    device = "cuda" if backend == "nccl" else "cpu"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.full((size // world,), rank + 1, dtype=torch.uint8, device=device)
    whole = [torch.empty_like(part) for _ in range(world)]
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            dist.barrier()
            began = time.perf_counter()
        dist.all_gather(whole, part)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / rounds
    right = all(int(found.min()) == int(found.max()) == number + 1 for number, found in enumerate(whole))
    moved = size // world * (world - 1)
    result = {"rank": rank, "world": world, "bytes": size, "seconds": seconds, "right": right}
    print(MARK + json.dumps(result | {"gbytes": moved / seconds / 1e9}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
