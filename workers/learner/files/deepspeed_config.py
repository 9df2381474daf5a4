"""DeepSpeed's configuration for a policy's or critic's settings."""

from typing import Any

from rlsys.config.derived import adds_packs_in_float32
from rlsys.config.schema import PolicyConfig


def deepspeed_config(p: PolicyConfig, bucket: int | None = None, on_gpu: bool = False) -> dict[str, Any]:
    """Returns DeepSpeed's configuration for ours. `bucket`: elements of gradients that ranks exchange at once."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand, because the number of packs varies
        "gradient_clipping": p.clip_grad,
        "zero_optimization": zero_config(p, bucket, on_gpu),
        "bf16": {"enabled": p.dtype == "bfloat16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if p.dtype == "bfloat16" and p.grad_dtype == "float32":
        config["communication_data_type"] = "fp32"  # for sums over ranks
        if adds_packs_in_float32(p):
            config["data_types"] = {"grad_accum_dtype": "fp32"}  # for sums over packs
    return config


def zero_config(p: PolicyConfig, bucket: int | None, on_gpu: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": p.zero_stage}
    if bucket:
        zero["reduce_bucket_size"] = bucket  # the default would take gigabytes of a GPU
    if "optimizer" in p.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if "params" in p.offload:
        zero["offload_param"] = {"device": "cpu"}
    if p.zero_stage == 3 and not on_gpu:  # on GPUs DeepSpeed gathers the next layers while one computes
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    return zero
