"""Errors outside the algorithm: of workers, of the disk, and a request to stop.

A worker is `lost` when its process has died, `stalled` when it does not answer in time, and `failed` when it raised an
error. A stalled worker is killed, and is lost from then on. A verdict has `failed` when it has no score.
"""

import errno

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


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


class TooManyRewardFailures(RuntimeError):
    """Too many verdicts of a step failed."""


class NothingToLearn(RuntimeError):
    """Too few groups of a step had different rewards."""


def describe_disk_error(error: BaseException) -> str:
    """Describes a disk error in one sentence; empty for any other error."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return ""
    return (
        f"{error.filename or 'the run directory'}: {error.strerror}. What was saved before is whole: "
        "make room, or repair the disk, and run the same command again."
    )
