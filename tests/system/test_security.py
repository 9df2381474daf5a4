"""What a real run opens to others, and what it writes of a secret that its reward function has."""

import pytest
from looking import Seen

pytestmark = pytest.mark.long


def test_no_process_of_a_run_listens_beyond_loopback(trapped: Seen) -> None:
    owners = " ".join(trapped.listening)
    for name in ("gcs_server", "raylet", "PolicyRank", "RolloutWorker", "RewardWorker", "DashboardAgent"):
        assert name in owners
    assert [place for place in trapped.listening if not place.startswith(("127.", "::ffff:127.", "::1 "))] == []


def test_a_secret_of_a_reward_function_stands_in_no_file_no_command_and_no_output(trapped: Seen) -> None:
    run, secret = trapped.run, trapped.run.environment["OWN_ACCESS"]
    assert any("the service refuses the key ***" in e["detail"] for e in run.events("reward failure"))
    files = [p for p in run.path.rglob("*") if p.is_file()]
    assert {"config.yaml", "events.jsonl", "reward-0.log"} <= {p.name for p in files}
    assert [str(p) for p in files if secret.encode() in p.read_bytes()] == []
    assert "${oc.env:OWN_ACCESS}" in (run.path / "config.yaml").read_text()
    assert secret not in run.text() + " ".join(trapped.commands)


def test_what_a_run_writes_is_not_open_to_be_written_by_others(trapped: Seen) -> None:
    path = trapped.run.path
    assert [str(p) for p in [path, *path.rglob("*")] if not p.is_symlink() and p.stat().st_mode & 0o002] == []
