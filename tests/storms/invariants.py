"""What must hold in every storm. Each is named here, and checked where the number stands."""

INVARIANTS = {
    1: "what was asked for waits, is held by one worker, or has come; each comes once",
    2: "each prompt is trained on once over all lives of a run, in order, or dropped with a reason",
    3: "no token is of a version that is not synced yet, and no batch is older than max_lag allows",
    4: "an engine samples only with the weights that were synced, and only when it is set up",
    5: "every wait has somebody who owes: a call, a process or a timer",
    6: "no healthy worker is replaced",
    7: "nothing is left in a worker that the driver does not know",
    8: "metrics.jsonl has each step once, without a gap, and each has its samples",
    9: "a checkpoint in place is intact at any moment",
    10: "after SIGTERM all finished steps are saved; after SIGKILL the last checkpoint in place is",
    11: "final weights equal those of the undisturbed run",
    12: "what takes too long is noticed in time, and a run ends only after enough faults",
    13: "a verdict that failed is no reward, and a reward is that of its own sample",
    14: "a run leaves no file but its own",
}


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, number: int, facts: str):
        super().__init__(f"invariant {number} ({INVARIANTS[number]}): {facts}")
        self.number = number


def require(number: int, holds: object, facts: str) -> None:
    if not holds:
        raise Broken(number, facts)
