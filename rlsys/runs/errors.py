"""What can go wrong beyond the algorithm: workers that fail or are lost, a disk that takes no more, the wish to stop."""

import errno

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


class WorkerFailed(RuntimeError):
    """A worker raised, or answered what cannot be. Trying again would end the same way. The sentence names it and its log."""


class WorkerLost(WorkerFailed):
    """A worker died, or stalled and was given up. Another one may take its place."""


class WrongWeights(WorkerLost):
    """An engine computes with other weights than the policy's. What it has sampled with them has gone nowhere."""


class StepAbandoned(Exception):
    """The run was told to stop, and what it waited for took longer than its grace."""


class TooManyRewardFailures(RuntimeError):
    """Too many verdicts of a step were failures."""


class NothingToLearn(RuntimeError):
    """Too few groups of a step had rewards that differ."""


def describe_disk_error(error: BaseException) -> str:
    """In one sentence, if that is what it is."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return ""
    return (
        f"{error.filename or 'the run directory'}: {error.strerror}. What was saved before is whole: "
        "make room, or mend the disk, and run the same command again."
    )
