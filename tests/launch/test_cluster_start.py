"""Workers of several kinds come up at the same time, after what a killed driver has left is gone."""

import dataclasses
import json
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from launch.cluster import RunningCluster, run_concurrently, running_cluster
from launch.models import find_control_tokens, find_reference_model, require_end_token, require_same_vocabulary
from rlsys.config.methods import AlgorithmConfig, ReferenceConfig
from rlsys.config.schema import Config, RunConfig
from rlsys.errors import ConfigError, WorkerLost
from rlsys.models.config_json import ModelLimits
from rlsys.runs.directory import RunDirectory
from rlsys.tasks import two_modes, zigzag
from workers.fleet.process_registry import ProcessInfo
from workers.fleet.watchdog import Watchdog


def test_all_are_started_at_the_same_time() -> None:
    met = threading.Barrier(3, timeout=20)
    run_concurrently([partial(meet, met)] * 3)  # one after the other they would never meet


def meet(others: threading.Barrier) -> None:
    others.wait()


def test_the_first_failure_is_raised_without_waiting_for_the_others() -> None:
    over = threading.Event()

    def fail() -> None:
        raise ValueError("no such model")

    began = time.monotonic()
    with pytest.raises(ValueError, match="no such model"):
        run_concurrently([partial(linger, over), fail])
    assert time.monotonic() - began < 10
    over.set()


def linger(over: threading.Event) -> None:
    over.wait(20)


def test_the_reference_starts_with_its_own_model_and_the_others_with_the_policys() -> None:
    started: dict[str, tuple[object, ...]] = {}

    def worker(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            start=lambda *arguments: started.update({name: arguments}), connect=lambda *arguments: None
        )

    cluster = RunningCluster(
        Config(),
        lambda _: None,
        model="own",
        reference_model="other",
        tokenizer=None,
        limits=ModelLimits(),
        transport="shared_memory",
        address="",
        metrics_urls=[],
        groups={name: worker(name) for name in ("policy", "reference", "critic", "rollout", "reward")},
    )
    cluster.wait_until_ready(17)
    assert started == {
        "reward": (),
        "policy": ("own", "shared_memory"),
        "reference": ("other", "own"),
        "critic": ("own",),
        "rollout": ("own", "shared_memory", 17),
    }


def test_a_reference_with_another_tokenizer_is_refused() -> None:
    config, ours, theirs = load_config_of_reference(), zigzag.make_tokenizer(), zigzag.make_tokenizer()
    require_same_vocabulary(ours, theirs, config)
    theirs.add_tokens(["new"])
    require_same_vocabulary(ours, theirs, config)  # it may know more
    with pytest.raises(
        ConfigError, match=r"other/model has another tokenizer than builtin:tiny: 1 of 14 tokens differ"
    ):
        require_same_vocabulary(theirs, ours, config)


def control_tokens(*texts: str) -> Config:
    return dataclasses.replace(Config(), algorithm=AlgorithmConfig(control_tokens=dict.fromkeys(texts, 0.5)))


def test_control_tokens_are_found_by_their_text() -> None:
    tokenizer = two_modes.make_tokenizer()
    assert find_control_tokens(control_tokens("<short>", "<think>"), tokenizer, 15) == {13: 0.5, 14: 0.5}
    assert find_control_tokens(Config(), tokenizer, 15) == {}


def test_a_control_token_of_several_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"control_tokens: `12` is 2 tokens of builtin:tiny, and must be one"):
        find_control_tokens(control_tokens("12"), two_modes.make_tokenizer(), 15)


def test_a_control_token_that_the_model_lacks_is_refused() -> None:
    tokenizer = two_modes.make_tokenizer()
    with pytest.raises(
        ConfigError, match=r"`<think>` is token 14 of the tokenizer, and the model's 14 tokens end at 13"
    ):
        find_control_tokens(control_tokens("<short>", "<think>"), tokenizer, 14)


def test_an_end_token_that_the_model_lacks_is_refused() -> None:
    tokenizer = zigzag.make_tokenizer()
    require_end_token(tokenizer, 13, "a/model")
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    require_end_token(tokenizer, 14, "a/model")
    with pytest.raises(
        ConfigError, match=r"a/model ends sequences with `<\|end\|>`, its token 13, and the model's 13 tokens"
    ):
        require_end_token(tokenizer, 13, "a/model")


def test_prompts_keep_the_limits_of_policy_and_reference(tmp_path) -> None:
    zigzag.make_tokenizer().save_pretrained(tmp_path)
    settings = {"model_type": "qwen2", "vocab_size": 20, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = dataclasses.replace(Config(), reference=ReferenceConfig(path=str(tmp_path), kl_coef=0.1))
    for policy, both in (((128, 13), (64, 13)), ((32, 30), (32, 20)), ((0, 0), (64, 20))):
        found = find_reference_model(config, zigzag.make_tokenizer(), ModelLimits(*policy), print)
        assert found == (str(tmp_path), ModelLimits(*both))


def test_a_control_token_that_the_tokenizer_does_not_know_is_refused() -> None:
    """Every unknown text is the same token."""
    with pytest.raises(ConfigError, match="does not know `é` and reads `<pad>` in its place"):
        find_control_tokens(control_tokens("<short>", "é"), two_modes.make_tokenizer(), 15)


def load_config_of_reference() -> Config:
    return dataclasses.replace(Config(), reference=ReferenceConfig(path="other/model", kl_coef=0.1))


def test_a_start_removes_only_shared_memory_of_a_killed_driver(tmp_path, monkeypatch) -> None:
    def no_ray(config: Config, logs: object) -> None:
        raise WorkerLost("no Ray")

    monkeypatch.setattr("launch.cluster.ray_session", no_ray)
    monkeypatch.setattr("launch.ray_session.leftovers.short_temp_dir", lambda: str(tmp_path))
    monkeypatch.setattr("workers.fleet.process_registry.SHARED_MEMORY_PREFIXES", (f"{tmp_path}/psm_",))
    config = dataclasses.replace(Config(), run=RunConfig(dir=str(tmp_path / "run")))
    (tmp_path / "psm_folder").mkdir()
    (tmp_path / "mine").touch()
    foreign = f"{tmp_path}/mine", f"{tmp_path}/psm_folder/../mine"
    for name in ("rollout-0", "rollout-1"):  # killed once, and once more
        run = RunDirectory(config)
        left = tmp_path / f"psm_{name}"
        left.touch()
        place = ProcessInfo("node", 1, 0.5, [str(left), f"{tmp_path}/psm_gone", *foreign])
        (run.logs / f"{name}.pid").write_text(json.dumps(dataclasses.asdict(place)))
        (run.logs / "rollout-2.pid").write_text("{")  # cut off
        run.close()
        again = RunDirectory(config)
        with pytest.raises(WorkerLost), running_cluster(config, Watchdog(again.logs), None):
            pass
        again.close()
        assert not left.exists()
        assert (tmp_path / "mine").exists()
        assert not list(again.logs.glob("*.pid"))
