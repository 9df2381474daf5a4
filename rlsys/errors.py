"""Errors that end a run, a step or a worker. Each is raised in one room and handled in another; others stay in their rooms.

    ConfigError                 the user's: each problem is a sentence with a way out. Exit code 2
    └─ NoCluster                nothing answers at a cluster's address (launch/ray_session/connect.py)
    Disagreement                engines and policy compute different log-probs: nothing is trained. Exit code 1
    TooManyRewardFailures       of a step. Exit code 1
    NothingToLearn              in a step. Exit code 1
    WorkerFailed                it would happen again. Exit code 1
    └─ WorkerLost               a worker that has a state of its own is replaced; for others the run restarts, exit code 75
       ├─ NodeLost
       └─ WrongWeights
    StepAbandoned               the run was asked to stop: what is done is saved. Exit code 0

A worker is `lost` when its process has died, `stalled` when it does not answer in time, and `failed` when it raised an
error. A stalled worker is killed, and is lost from then on. A verdict has `failed` when it has no score.
`launch/tools/cli/exit_codes.py` makes exit codes of them, `launch/supervise.py` restarts after 75.
"""

import errno

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


class ConfigError(ValueError):
    """Something in the configuration, or in what it points to, that the user can fix. Each problem is one sentence."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


class Disagreement(RuntimeError):
    """The engines and the policy compute different log-probs: the run would learn from another policy's samples."""


class TooManyRewardFailures(RuntimeError):
    """Too many verdicts of a step failed."""


class NothingToLearn(RuntimeError):
    """Too few groups of a step had different rewards."""


class WorkerFailed(RuntimeError):
    """A worker raised an error, or gave an impossible answer. A retry would fail too. The message names its log."""


class WorkerLost(WorkerFailed):
    """A worker's process died, or it stalled and was killed. It may be replaced."""


class NodeLost(WorkerLost):
    """The node of the worker died, or was preempted: no fault of what the worker was doing."""


class WrongWeights(WorkerLost):
    """An engine has other weights than the policy's. Nothing that it sampled with them has been used."""


class StepAbandoned(Exception):
    """The run was asked to stop, and the current step was abandoned at the end of the grace period."""


def describe_disk_error(error: BaseException) -> str:
    """Describes a disk error in one sentence; empty for any other error."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return ""
    return (
        f"{error.filename or 'the run directory'}: {error.strerror}. What was saved before is whole: "
        "make room, or repair the disk, and run the same command again."
    )
