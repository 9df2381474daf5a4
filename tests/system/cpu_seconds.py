"""CPU time of a whole run, and of the forward and backward passes that it needs. Other programs slow both alike."""

import contextlib
import threading
import time

import psutil
import torch
from transformers import AutoModelForCausalLM

from rlsys.tasks.zigzag import model_folder

SAMPLES, TOKENS = 512, 14  # of a step of the demo; tokens of a prompt and its completion


class CpuSeconds(threading.Thread):
    """Adds up the CPU time of a process and of all that it starts, until it ends."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.seconds: dict[psutil.Process, float] = {}
        self.start()

    def run(self) -> None:
        while self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                for process in (self.process, *self.process.children(recursive=True)):
                    self.look_at(process)
            time.sleep(0.5)

    def look_at(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            self.seconds[process] = times.user + times.system

    def total(self) -> float:
        self.join()
        return sum(self.seconds.values())


def plain_seconds(steps: int) -> float:
    """CPU seconds of one thread of PyTorch for one forward and one backward pass of each sample of so many steps."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(0), dtype=torch.float32)
    ids = torch.randint(model.config.vocab_size, (SAMPLES, TOKENS))
    threads, measured = torch.get_num_threads(), 3
    torch.set_num_threads(1)  # several would spin while they wait for each other
    began = time.process_time()
    for _ in range(measured):
        model(ids, labels=ids).loss.backward()
    seconds = time.process_time() - began
    torch.set_num_threads(threads)
    return seconds / measured * steps
