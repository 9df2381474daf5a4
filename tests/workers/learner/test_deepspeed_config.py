"""DeepSpeed's settings for ours, as DeepSpeed reads them."""

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from rlsys.config.schema import PolicyConfig
from workers.learner.zero import deepspeed_config


@pytest.mark.parametrize(("on_gpu", "prefetched"), [(False, 0), (True, 50_000_000)])
def test_zero_3_gathers_ahead_on_gpus_only(on_gpu: bool, prefetched: int) -> None:
    settings = deepspeed_config(PolicyConfig(zero_stage=3), 0, on_gpu)["zero_optimization"]
    zero = DeepSpeedZeroConfig(**settings)
    assert zero.prefetch_bucket_size == prefetched
    assert bool(zero.param_persistence_threshold) == on_gpu
    assert zero.overlap_comm
