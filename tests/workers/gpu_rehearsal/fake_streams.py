# ruff: noqa: E402  (the environment is set before DeepSpeed is imported)
"""Updates by DeepSpeed's code for devices with streams, with tensors in main memory.

A rank of `test_streams.py` runs this file: `python fake_streams.py RANK RANKS PORT`. It prints a line for each case.
"""

import json
import os
import sys

RANK, RANKS, PORT = sys.argv[1:]
os.environ |= {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1"}
os.environ |= {"RANK": RANK, "LOCAL_RANK": "0", "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}

import deepspeed
import fake_accelerator  # noqa: F401
import torch
from streamed_update import CASES, run_case

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
for case in CASES:
    print("CASE", json.dumps(run_case(case, int(RANK), int(RANKS))), flush=True)
