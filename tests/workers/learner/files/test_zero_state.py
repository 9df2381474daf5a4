"""Checkpoints of every ZeRO stage resume bit for bit, and an update that is not finite leaves no trace."""

import errno
import hashlib
import importlib.util
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_updates import KL_COEF, LR, ragged_batch, train, weigh, weights

from rlsys.batching.packing import pack
from rlsys.config.schema import Config
from rlsys.types import Columns
from workers.learner.policy import PolicyGroup
from workers.learner.zero import MUON_CLASS, MUON_MODULE

CASES = {  # settings of policy.*, by name
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "2-offload": {"zero_stage": 2, "offload": ["optimizer"]},
    "3-offload": {"zero_stage": 3, "offload": ["optimizer", "params"]},
    "0-bfloat16": {"zero_stage": 0, "dtype": "bfloat16"},
    "1-bfloat16": {"zero_stage": 1, "dtype": "bfloat16"},
    "2-bfloat16": {"zero_stage": 2, "dtype": "bfloat16"},
    "3-bfloat16": {"zero_stage": 3, "dtype": "bfloat16"},
}
LONG = ("0-bfloat16", "2-bfloat16", "3-bfloat16")


Ranks = Callable[..., PolicyGroup]


@pytest.fixture
def ranks(policy: Callable[..., PolicyGroup], tiny: Callable[..., Config], changed: Callable[..., Config]) -> Ranks:
    """`ranks("3-offload", 2)`: that many ranks, as at the start of a run."""
    return lambda case, count=2: policy(changed(tiny(), "policy", ranks=count, **CASES[case]))


def digests(group: PolicyGroup) -> list[str]:
    return group.call_all("digest")


Spoil = Callable[[Columns, "np.ndarray[Any, Any]"], None]


def update(group: PolicyGroup, spoil: Spoil = lambda *_: None) -> Any:
    """Makes one update on random samples. `spoil` changes the columns; it gets the indices of sample 11's tokens."""
    batch = ragged_batch(7)
    old = np.concatenate([s.logprobs for s in batch.samples])
    columns = Columns(advantages=np.ones_like(old), old=old, ref=old.copy())
    ends = batch.lengths.cumsum()
    spoil(columns, np.arange(ends[10], ends[11]))
    packs = pack(
        batch,
        range(16),
        ranks=group.ranks,
        tokens_per_pack=64,
        columns=columns,
        weights=weigh(batch, list(range(16))),
    )
    return group.update(packs, LR, KL_COEF)


def set_advantage_to_nan(columns: Columns, tokens: "np.ndarray[Any, Any]") -> None:
    assert columns.advantages is not None
    columns.advantages[tokens[0]] = np.nan


def set_reference_to_infinity(columns: Columns, tokens: "np.ndarray[Any, Any]") -> None:
    """The loss becomes infinite, and its gradient stays finite."""
    assert columns.ref is not None
    columns.ref[tokens[-1]] = -np.inf


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_checkpoint_continues_bit_for_bit(ranks: Ranks, tmp_path: Path, case: str) -> None:
    group = ranks(case)
    train(group, 64, step=0)
    group.save(str(tmp_path))
    expected = train(group, 64, step=1), digests(group)
    hashes = group.saved_files(wait=True)
    assert hashes is not None
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == {tmp_path / name for name in hashes}
    assert "optimizer/part-00000-of-00002.safetensors" in hashes
    models = [name for name in hashes if name.startswith("model/") and name.endswith(".safetensors")]
    assert (models == ["model/model.safetensors"]) == (not case.startswith("3")), "with ZeRO 3, each rank writes a part"
    for name, digest in hashes.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest

    group = ranks(case)
    group.load(str(tmp_path))
    assert (train(group, 64, step=1), digests(group)) == expected


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] if case in LONG else []) for case in CASES]
)
def test_an_update_that_is_not_finite_leaves_no_trace(ranks: Ranks, case: str) -> None:
    group = ranks(case)
    train(group, 64, step=0)
    first = update(group)
    assert (first["skipped"], first["first_bad_sample"]) == (0.0, math.inf)
    expected = train(group, 64, step=1), digests(group)

    group = ranks(case)
    initial = digests(group)
    assert update(group, set_reference_to_infinity)["skipped"] == 1.0
    assert digests(group) == initial, "the very first update"
    train(group, 64, step=0)
    assert update(group) == first
    before = digests(group)
    for spoil in (set_advantage_to_nan, set_reference_to_infinity):
        skipped = update(group, spoil)
        assert (skipped["skipped"], skipped["first_bad_sample"]) == (1.0, 11), spoil.__name__
        assert digests(group) == before, spoil.__name__
    group.call_all("steepen", math.inf)
    skipped = update(group)
    assert (skipped["skipped"], skipped["first_bad_sample"]) == (1.0, math.inf), (
        "losses and their gradients are finite, only the gradient of the weights is not"
    )
    assert math.isfinite(skipped["loss"])
    assert digests(group) == before
    group.call_all("stop_steepening")
    assert (train(group, 64, step=1), digests(group)) == expected


@pytest.mark.parametrize(
    ("writers", "saved", "readers", "loaded"), [(2, "2", 1, "0"), (2, "3", 1, "3"), (1, "1", 2, "3"), (2, "0", 2, "2")]
)
def test_other_ranks_and_stages_can_load_a_checkpoint(
    ranks: Ranks, tmp_path: Path, writers: int, saved: str, readers: int, loaded: str
) -> None:
    group = ranks(saved, writers)
    train(group, 64, step=0)
    group.save(str(tmp_path))
    group.saved_files(wait=True)
    at_save = weights(group)
    expected, end = train(group, 64, step=1), weights(group)

    other = ranks(loaded, readers)
    other.load(str(tmp_path))
    assert torch.equal(weights(other), at_save)
    for actual, wanted in zip(train(other, 64, step=1), expected, strict=True):
        assert actual == pytest.approx(wanted, abs=1e-5, rel=1e-4)
    assert (weights(other) - end).abs().max() < 1e-5
    assert (weights(other) - at_save).abs().max() > 1e-4


def test_training_during_a_write_does_not_change_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    group = ranks("2")
    train(group, 64, step=0)
    group.save(str(tmp_path / "whole"))
    group.saved_files(wait=True)

    part = "optimizer/part-00000-of-00002.safetensors"
    pipe = tmp_path / "slow" / part
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)  # as a very slow disk: a write blocks until something reads
    before = digests(group)
    group.save(str(tmp_path / "slow"))
    assert group.saved_files(wait=False) is None
    train(group, 64, step=1)
    assert digests(group) != before
    assert group.saved_files(wait=False) is None
    assert pipe.read_bytes() == (tmp_path / "whole" / part).read_bytes()
    with pytest.raises(OSError, match=f"{pipe}") as raised:  # a pipe cannot be synced to a disk
        group.saved_files(wait=True)
    assert raised.value.errno == errno.EINVAL


def test_a_full_disk_is_reported_and_the_next_checkpoint_is_good(ranks: Ranks, tmp_path: Path) -> None:
    group = ranks("1")
    part = "optimizer/part-00001-of-00002.safetensors"
    (tmp_path / "full" / "optimizer").mkdir(parents=True)
    (tmp_path / "full" / part).symlink_to("/dev/full")
    group.save(str(tmp_path / "full"))
    with pytest.raises(OSError, match="No space left on device") as raised:
        group.saved_files(wait=True)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "full" / part))
    assert train(group, 64, step=0)
    group.save(str(tmp_path / "next"))
    assert part in (group.saved_files(wait=True) or {})


class Bomb:
    """Creates a directory when it is unpickled."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_no_pickle_in_a_checkpoint_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    group = ranks("0", 1)
    folder, exploded = tmp_path / "checkpoint", tmp_path / "exploded"
    group.save(str(folder))
    group.saved_files(wait=True)
    bomb = pickle.dumps(Bomb(exploded))
    for name in ("optimizer/state.pt", "optimizer/part-00000-of-00001.bin", "model/pytorch_model.bin", "latest"):
        (folder / name).write_bytes(bomb)
    group.load(str(folder))
    (folder / "optimizer" / "part-00000-of-00001.safetensors").write_bytes(bomb)
    with pytest.raises(Exception, match=r"part-00000-of-00001\.safetensors cannot be read"):
        group.load(str(folder))
    assert not exploded.exists()
    sources = [p for top in ("rlsys", "workers", "launch") for p in Path(top).rglob("*.py")]
    assert sources
    assert not [p for p in sources if "torch.load(" in p.read_text() or "load_checkpoint(" in p.read_text()]


def test_the_replaced_module_of_deepspeed_exists_and_has_the_class() -> None:
    spec = importlib.util.find_spec(MUON_MODULE)
    assert spec is not None
    assert f"class {MUON_CLASS}(" in Path(str(spec.origin)).read_text()
