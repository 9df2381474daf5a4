"""DeepSpeed's settings for ours, as DeepSpeed reads them."""

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from rlsys.config.derived import reduce_bucket
from rlsys.config.schema import PolicyConfig
from workers.learner.files.deepspeed_config import deepspeed_config


def zero(bucket: int | None = None, on_gpu: bool = False) -> DeepSpeedZeroConfig:
    return DeepSpeedZeroConfig(**deepspeed_config(PolicyConfig(zero_stage=3), bucket, on_gpu)["zero_optimization"])


@pytest.mark.parametrize(("on_gpu", "prefetched"), [(False, 0), (True, 50_000_000)])
def test_zero_3_gathers_ahead_on_gpus_only(on_gpu: bool, prefetched: int) -> None:
    assert zero(on_gpu=on_gpu).prefetch_bucket_size == prefetched
    assert bool(zero(on_gpu=on_gpu).param_persistence_threshold) == on_gpu
    assert zero(on_gpu=on_gpu).overlap_comm


@pytest.mark.parametrize(
    ("trained", "bucket"),
    [
        (494_032_768, 50_000_000),
        (1_600_000_000, 100_000_000),
        (7_615_616_512, 475_976_032),
        (32_000_000_000, 500_000_000),
    ],
)
def test_the_bucket_of_gradients_on_gpus_grows_with_the_model(trained: int, bucket: int) -> None:
    assert zero(reduce_bucket(trained), True).reduce_bucket_size == bucket


def test_on_cpus_the_bucket_is_deepspeeds_own() -> None:
    assert zero().reduce_bucket_size == DeepSpeedZeroConfig(stage=3).reduce_bucket_size
