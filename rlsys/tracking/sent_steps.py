"""The last step that each tracker has: tracking.json in the run directory. A continued run continues there too.

    {"id": "demo-3f9a01c2", "sent": {"tensorboard": 37}}

It is written after each step that was sent. After a kill in between, that step is sent once more.
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
            state = json.loads(self.file.read_text())
        except (OSError, json.JSONDecodeError):  # the first start, or power was lost while it was written
            name = re.sub(r"[^\w.-]", "-", run.name)[:60]
            state = {"id": f"{name}-{secrets.token_hex(4)}", "sent": {}}
        self.run_id: str = state["id"]
        self.by_tracker: dict[str, int] = state["sent"]

    def last_step(self, tracker: str) -> int | None:
        """Returns the last step that the tracker has; None if it has never been started in this run."""
        return self.by_tracker.get(tracker)

    def record(self, tracker: str, step: int) -> None:
        with self.lock:
            self.by_tracker[tracker] = step
            unfinished = self.file.with_name(f".{self.file.name}.tmp")
            unfinished.write_text(json.dumps({"id": self.run_id, "sent": self.by_tracker}))
            os.replace(unfinished, self.file)
