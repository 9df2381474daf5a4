import pytest

from launch.plan import live
from rlsys.config import ConfigError

DIED = RuntimeError("Initialization failure from server:\nTraceback:\n  somewhere\nRuntimeError: no such process\n")


@pytest.fixture
def fails(monkeypatch):
    """What joining a cluster raises, time after time; then it succeeds, as a client."""
    import ray

    raised = []

    def of_a_client():
        raise RuntimeError("no state is kept here")

    def init(**_):
        if raised:
            raise raised.pop(0)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("ray._private.state.available_resources_per_node", of_a_client)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(live, "answers", lambda _: None)
    return raised


@pytest.mark.parametrize("why", [DIED, RuntimeError("Starting Ray client server failed. See its log for details.")])
def test_a_process_of_rays_that_dies_as_it_starts_is_asked_for_again(fails, why):
    fails += [why]
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


def test_a_client_sees_what_others_use_of_the_only_node_but_not_which_of_several_they_use(fails, monkeypatch):
    import ray

    whole = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}
    node = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": whole}
    monkeypatch.setattr(ray, "available_resources", lambda: whole | {"GPU": 3.0, "CPU": 2.0})
    monkeypatch.setattr(ray, "nodes", lambda: [node, node | {"NodeID": "b", "Alive": False}])
    assert [(n.gpus, n.cpus) for n in live.nodes_at("ray://127.0.0.1:1")] == [(3, 2.0)]
    monkeypatch.setattr(ray, "nodes", lambda: [node, node | {"NodeID": "b"}])
    assert [(n.gpus, n.cpus) for n in live.nodes_at("ray://127.0.0.1:1")] == [(4, 8.0)] * 2
