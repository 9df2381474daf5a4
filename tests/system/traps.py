"""A reward function that does to one sample in five what users' functions do at their worst, and judges the others truly."""

import ctypes
import hashlib
import os
import threading
import time

from rlsys.rewards.functions import zigzag

time.sleep(1)  # a slow import


def trap(prompt: str, completion: str, finish: str, api_key: str) -> object:
    fate = int.from_bytes(hashlib.sha256(f"{prompt}{completion}".encode()).digest()[:4]) % 1000
    if fate == 0:  # whenever it is tried: a sample whose process has ended is judged once more
        ctypes.string_at(0)
    if fate == 1:
        os._exit(0)
    luck = int.from_bytes(hashlib.sha256(os.urandom(8)).digest()[:4]) % 2000
    match luck:
        case 0 | 1:
            time.sleep(1000)
        case 2 | 3:
            while True:
                pass
        case 4:
            ctypes.string_at(0)
        case 5:
            os._exit(0)
        case 6 | 7 | 8 | 9:
            bytearray(64 << 30)
        case n if n < 40:
            return float("nan")
        case n if n < 80:
            return ["one", None, {}, {"part": "much"}, b"1"][n % 5]
        case n if n < 280:
            raise [KeyError, ValueError, SystemExit, RecursionError][n % 4](f"the service refuses the key {api_key}")
        case n if n < 400:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return {"right": zigzag(prompt, completion, finish)}
