"""What trackers have of a run: tracking.json in the run directory, so that a run that goes on goes on there too.

    {"id": "demo-3f9a01c2", "sent": {"tensorboard": 37}}

It is written after each step that was taken. Killed in between, that one step is sent once more.
"""

import json
import os
import re
import secrets
import threading
from pathlib import Path


class SentSteps:
    def __init__(self, run: Path):
        self.file, self.lock = run / "tracking.json", threading.Lock()
        try:
            there = json.loads(self.file.read_text())
        except (OSError, json.JSONDecodeError):  # the first start, or power was lost while it was written
            name = re.sub(r"[^\w.-]", "-", run.name)[:60]
            there = {"id": f"{name}-{secrets.token_hex(4)}", "sent": {}}
        self.run_id: str = there["id"]
        self.by_tracker: dict[str, int] = there["sent"]

    def last_step(self, tracker: str) -> int | None:
        """The last step it has; none, if it has never begun this run."""
        return self.by_tracker.get(tracker)

    def record(self, tracker: str, step: int) -> None:
        with self.lock:
            self.by_tracker[tracker] = step
            aside = self.file.with_name(f".{self.file.name}.tmp")
            aside.write_text(json.dumps({"id": self.run_id, "sent": self.by_tracker}))
            os.replace(aside, self.file)
