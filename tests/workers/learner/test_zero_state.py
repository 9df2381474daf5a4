"""What the trainers save is the same whatever the ZeRO stage, and goes on bit for bit; an update that is not finite never was."""

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
from test_policy import KL_COEF, LR, mean_of_tokens, ragged_batch, train, weights

from rlsys.config.schema import Config
from rlsys.packs.packing import pack
from rlsys.types import Columns
from workers.learner.policy import PolicyGroup
from workers.learner.zero import MUON_CLASS, MUON_MODULE

EVERY = {  # settings of policy.*, by what to call them
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "2-offload": {"zero_stage": 2, "offload_optimizer": True},
    "3-offload": {"zero_stage": 3, "offload_optimizer": True, "offload_params": True},
    "0-bfloat16": {"zero_stage": 0, "dtype": "bfloat16"},
    "1-bfloat16": {"zero_stage": 1, "dtype": "bfloat16"},
    "2-bfloat16": {"zero_stage": 2, "dtype": "bfloat16"},
    "3-bfloat16": {"zero_stage": 3, "dtype": "bfloat16"},
}


Ranks = Callable[..., PolicyGroup]


@pytest.fixture
def ranks(policy: Callable[..., PolicyGroup], tiny: Callable[..., Config], changed: Callable[..., Config]) -> Ranks:
    """`ranks("3-offload")`: two of them, or another number, as at the start of a run."""
    return lambda case, count=2: policy(changed(tiny(), "policy", ranks=count, **EVERY[case]))


def digests(group: PolicyGroup) -> list[str]:
    return group.call_all("digest")


def update(group: PolicyGroup, spoil: Callable[[Columns, "np.ndarray[Any, Any]"], None] = lambda *_: None) -> Any:
    """One update on made-up samples; `spoil` gets the columns and where in them sample 11 is."""
    batch = ragged_batch(7)
    everything = pack(batch, range(16), ranks=group.ranks, tokens_per_pack=64)
    old = np.concatenate([s.logprobs for s in batch.samples])
    columns = Columns(advantages=np.ones_like(old), old=old, ref=old.copy())
    ends = batch.lengths.cumsum()
    spoil(columns, np.arange(ends[10], ends[11]))
    everything = pack(
        batch,
        range(16),
        ranks=group.ranks,
        tokens_per_pack=64,
        columns=columns,
        weights=mean_of_tokens(batch, list(range(16))),
    )
    return group.update(everything, LR, KL_COEF)


def not_a_number(columns: Columns, where: "np.ndarray[Any, Any]") -> None:
    assert columns.advantages is not None
    columns.advantages[where[0]] = np.nan


def infinite_with_a_finite_gradient(columns: Columns, where: "np.ndarray[Any, Any]") -> None:
    assert columns.ref is not None
    columns.ref[where[-1]] = -np.inf


@pytest.mark.parametrize("case", EVERY)
def test_what_is_loaded_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, case: str) -> None:
    group = ranks(case)
    train(group, 64, steps=1)
    group.save(str(tmp_path))
    expected = train(group, 64, steps=1, first=1), digests(group)
    hashes = group.saved(wait=True)
    assert hashes is not None
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == {tmp_path / name for name in hashes}
    assert {"optimizer/part-00000-of-00002.safetensors", "model/model.safetensors"} < hashes.keys()
    for name, digest in hashes.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest

    group = ranks(case)
    group.load(str(tmp_path))
    assert (train(group, 64, steps=1, first=1), digests(group)) == expected


@pytest.mark.parametrize("case", EVERY)
def test_an_update_that_is_not_finite_never_was(ranks: Ranks, case: str) -> None:
    group = ranks(case)
    train(group, 64, steps=1)
    first = update(group)
    assert (first["skipped"], first["first_bad_sample"]) == (0.0, math.inf)
    expected = train(group, 64, steps=1, first=1), digests(group)

    group = ranks(case)
    new = digests(group)
    assert update(group, infinite_with_a_finite_gradient)["skipped"] == 1.0
    assert digests(group) == new, "the very first update"
    train(group, 64, steps=1)
    assert update(group) == first
    before = digests(group)
    for spoil in (not_a_number, infinite_with_a_finite_gradient):
        found = update(group, spoil)
        assert (found["skipped"], found["first_bad_sample"]) == (1.0, 11), spoil.__name__
        assert digests(group) == before, spoil.__name__
    group.call_all("steepen", math.inf)
    found = update(group)
    assert (found["skipped"], found["first_bad_sample"]) == (1.0, math.inf), (
        "loss and its gradient are finite, the weights' is not"
    )
    assert math.isfinite(found["loss"])
    assert digests(group) == before
    group.call_all("stop_steepening")
    assert (train(group, 64, steps=1, first=1), digests(group)) == expected


@pytest.mark.parametrize(
    ("writer", "wrote", "reader", "reads"), [(2, "2", 1, "0"), (2, "3", 1, "3"), (1, "1", 2, "3"), (2, "0", 2, "2")]
)
def test_other_ranks_and_stages_can_go_on(
    ranks: Ranks, tmp_path: Path, writer: int, wrote: str, reader: int, reads: str
) -> None:
    group = ranks(wrote, writer)
    train(group, 64, steps=1)
    group.save(str(tmp_path))
    group.saved(wait=True)
    then = weights(group)
    expected, end = train(group, 64, steps=1, first=1), weights(group)

    other = ranks(reads, reader)
    other.load(str(tmp_path))
    assert torch.equal(weights(other), then)
    for mine, theirs in zip(train(other, 64, steps=1, first=1), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-4)
    assert (weights(other) - end).abs().max() < 1e-5
    assert (weights(other) - then).abs().max() > 1e-4


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(ranks: Ranks, tmp_path: Path) -> None:
    group = ranks("2")
    train(group, 64, steps=1)
    group.save(str(tmp_path / "whole"))
    group.saved(wait=True)

    part = "optimizer/part-00000-of-00002.safetensors"
    pipe = tmp_path / "slow" / part
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)  # a disk so slow that nothing is written until somebody reads
    before = digests(group)
    group.save(str(tmp_path / "slow"))
    assert group.saved(wait=False) is None
    train(group, 64, steps=1, first=1)
    assert digests(group) != before
    assert group.saved(wait=False) is None
    assert pipe.read_bytes() == (tmp_path / "whole" / part).read_bytes()
    with pytest.raises(OSError, match=f"{pipe}") as raised:  # it cannot be brought to a disk
        group.saved(wait=True)
    assert raised.value.errno == errno.EINVAL


def test_a_full_disk_is_told_by_its_number_and_the_next_checkpoint_is_good(ranks: Ranks, tmp_path: Path) -> None:
    group = ranks("1")
    part = "optimizer/part-00001-of-00002.safetensors"
    (tmp_path / "full" / "optimizer").mkdir(parents=True)
    (tmp_path / "full" / part).symlink_to("/dev/full")
    group.save(str(tmp_path / "full"))
    with pytest.raises(OSError, match="No space left on device") as raised:
        group.saved(wait=True)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "full" / part))
    assert train(group, 64, steps=1)
    group.save(str(tmp_path / "next"))
    assert part in (group.saved(wait=True) or {})


class Bomb:
    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_no_pickle_in_a_checkpoint_is_ever_loaded(ranks: Ranks, tmp_path: Path) -> None:
    group = ranks("0", 1)
    folder, exploded = tmp_path / "checkpoint", tmp_path / "exploded"
    group.save(str(folder))
    group.saved(wait=True)
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


def test_what_stands_in_for_a_part_of_deepspeed_has_its_name_and_what_is_asked_of_it() -> None:
    found = importlib.util.find_spec(MUON_MODULE)
    assert found is not None
    assert f"class {MUON_CLASS}(" in Path(str(found.origin)).read_text()
