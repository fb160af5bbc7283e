"""One thread a process: tests run side by side, and small networks lose more by waiting for threads than they win."""

import os
import signal
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# A shell starts what runs in its background with Ctrl-C ignored, and all that is started there inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
