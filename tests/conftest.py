"""One thread a process: tests run side by side, and small networks lose more by waiting for threads than they win."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
