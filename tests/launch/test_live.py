import pytest

from launch.plan import live
from rlsys.config import ConfigError

DIED = RuntimeError("Initialization failure from server:\nTraceback:\n  somewhere\nRuntimeError: no such process\n")


@pytest.fixture
def fails(monkeypatch):
    """What joining a cluster raises, time after time; then it succeeds."""
    import ray

    raised = []

    def init(**_):
        if raised:
            raise raised.pop(0)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(live, "answers", lambda _: None)
    return raised


def test_a_process_of_rays_that_dies_as_it_starts_is_asked_for_again(fails):
    fails += [DIED]
    assert live.nodes_at("ray://127.0.0.1:1") == []
    assert not fails


def test_a_cluster_that_cannot_be_joined_is_told_with_the_cause(fails):
    fails += [DIED, DIED]
    with pytest.raises(ConfigError, match=r"ray://127.0.0.1:1 \(.*no such process\)"):
        live.nodes_at("ray://127.0.0.1:1")
    fails += [ConnectionError("refused"), DIED]
    with pytest.raises(ConfigError, match=r"\(refused\)"):
        live.nodes_at("127.0.0.1:1")
    assert fails == [DIED], "nothing else is tried twice"
