"""One thread a process: tests run side by side, and small networks lose more by waiting for threads than they win."""

import os
import signal
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# A shell starts what runs in its background with Ctrl-C ignored, and nohup with SIGHUP ignored; child processes inherit that.
if threading.current_thread() is threading.main_thread():
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
