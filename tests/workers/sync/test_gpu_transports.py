"""What the transports for GPUs do by themselves, without a GPU."""

import os
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rlsys.config.schema import ConfigError
from workers.sync import nccl
from workers.sync.cuda_ipc import Exports


def test_what_stays_in_memory_is_exported_once_and_what_is_freed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[torch.Tensor] = []

    def export(tensor: torch.Tensor) -> tuple[Any, Any]:
        exported.append(tensor.clone())
        return None, len(exported) - 1

    monkeypatch.setattr(reductions, "reduce_tensor", export)
    exports, flat = Exports(), torch.arange(100.0)

    def sync() -> list[int]:
        """Exports two weights of one storage that stays, and a cast that does not; returns their numbers."""
        cast = flat[:20].double()
        numbers = [exports.export(tensor) for tensor in (flat[:20].view(4, 5), flat[20:50], cast)]
        assert torch.equal(exported[numbers[2]], cast)
        del cast
        exports.forget_freed()
        return numbers

    assert sync() == [0, 1, 2]
    flat += 1
    assert sync() == [0, 1, 3]
    assert len(exports.known) == 2
    assert exports.export(flat[:20].view(5, 4)) == 4  # the same memory in another shape


def engine_settings(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return nccl.nccl_settings()


def test_engines_refuse_other_settings_of_nccl_than_the_policy_s(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = engine_settings(monkeypatch, NCCL_CUMEM_ENABLE="1", NCCL_P2P_DISABLE="1")
    with pytest.raises(ConfigError, match=r"NCCL_CUMEM_ENABLE 0 and 1; NCCL_P2P_DISABLE not set and 1.* cluster.env"):
        nccl.require_same_settings({"NCCL_CUMEM_ENABLE": "0"}, settings)
    nccl.require_same_settings(dict(settings), settings)


def test_nodes_may_name_their_parts_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = engine_settings(monkeypatch, NCCL_SOCKET_IFNAME="eth1", NCCL_DEBUG="INFO", NCCL_IB_HCA="mlx5_1")
    nccl.require_same_settings({}, settings)
