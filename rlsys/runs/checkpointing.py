"""Saves a run while it goes on, one checkpoint at a time, and restores it."""

from collections.abc import Sequence

from rlsys.interfaces import Learner
from rlsys.runs.checkpoint import Checkpoints, SavedCheckpoint
from rlsys.runs.run_log import RunLog
from rlsys.runs.state import RunState
from rlsys.types import Batch


class Checkpointing:
    """`begin` copies the state, workers write it while training goes on, `commit` puts the whole in place."""

    def __init__(
        self, log: RunLog, learners: Sequence[Learner], *, keep_last: int, newest: SavedCheckpoint | None = None
    ):
        self.log, self.learners, self.newest = log, learners, newest
        self.files = Checkpoints(log.run.path / "checkpoints", keep_last)
        self.saved_step = 0  # the last one whose state has been copied by every learner

    def restore(self) -> tuple[RunState, list[Batch]] | None:
        """Loads the newest undamaged checkpoint into the learners. Returns its state, and the batches sampled ahead."""
        checkpoint, self.newest = self.newest or self.files.load_newest(self.log.note), None
        if checkpoint is None:
            return None
        for learner in self.learners:
            learner.load(str(checkpoint.path))
        self.log.note(f"resumed from {checkpoint.path}")
        self.saved_step = checkpoint.state.step
        return checkpoint.state, checkpoint.pending

    def finish_previous(self) -> None:
        """Waits for the checkpoint being written. One that a learner has not begun is dropped, and started again."""
        if self.files.step != self.saved_step:
            self.files.step = None
        self.commit(wait=True)

    def begin(self, state: RunState, pending: list[Batch]) -> None:
        folder = self.files.begin(state, pending)
        for learner in self.learners:
            learner.save(folder)
        self.log.run.wait_for_samples()  # a checkpoint stands for samples, which must be on disk before it
        self.saved_step = state.step

    def commit(self, *, wait: bool) -> None:
        """Puts the checkpoint in place as soon as all of it is on disk."""
        if self.files.step is None:
            return
        written = [learner.saved_files(wait) for learner in self.learners]
        if None in written:
            return
        step = self.files.step
        path = self.files.complete({name: sha for files in written if files for name, sha in files.items()})
        self.log.event("checkpoint", step=step, path=str(path.relative_to(self.log.run.path)))

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint in place; 0 without one."""
        return self.files.last_step

    def older_weights(self) -> dict[str, str]:
        """Returns the newest checkpoint's model directory, by what it is: engines may still have those weights."""
        return {f"the checkpoint of step {step}": str(path / "model") for step, path in self.files.list_all()[-1:]}
