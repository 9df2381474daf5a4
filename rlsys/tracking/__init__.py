"""Metrics for TensorBoard, Weights & Biases, MLflow, or a user's own tracker, in addition to metrics.jsonl.

    trainer ──▶ metrics.jsonl, samples/, events.jsonl
                     │ read by a thread for each tracker (`follower`)
                     ▼
                tensorboard   wandb   mlflow   my_tracker.py:to_slack

The run never waits for a tracker, and its errors do not affect the run: it writes its files, and followers read them.
A tracker that was added later, or could not be reached, gets what it missed.
"""

from rlsys.tracking.tracker import RunInfo, Tracker

__all__ = ["RunInfo", "Tracker"]
