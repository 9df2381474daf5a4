"""The process that runs a user's reward functions. `workers.reward` starts, feeds, watches and kills it.

    pickle(facts) ──▶ judge ──▶ JSON(verdict)        first message: "" when the functions are imported, or what is wrong

Covered: it ends with its actor; it is killed past the deadline with everything it started; `reward.memory_mb` limits its
address space. Not covered: files, network and environment are the user's. Do not run untrusted code in a reward function.
"""

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection


def serve(functions: dict[str, float], memory_mb: int, fd: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the actor
    if os.getppid() != parent:
        return
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    connection = Connection(fd)
    from rlsys.rewards import Judge

    try:
        judge = Judge(functions)
    except BaseException as error:  # a user's file may raise anything, SystemExit included
        connection.send_bytes(json.dumps(str(error)).encode())
        return
    connection.send_bytes(b'""')
    while True:
        try:
            facts = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        verdict = judge(facts)
        answer = {
            "score": verdict.score,
            "components": verdict.components,
            "failure": verdict.failure,
            "detail": verdict.detail,
        }
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
