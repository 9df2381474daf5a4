"""The DeepSpeed configuration of a policy rank, from ours."""

from typing import Any

from rlsys.config import Policy


def deepspeed_config(p: Policy) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": p.zero_stage}
    if p.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if p.offload_params:
        zero["offload_param"] = {"device": "cpu"}
    if p.zero_stage == 3:
        # Gather just in time. Prefetching has not been tried.
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand: the number of packs varies
        "gradient_clipping": p.clip_grad,
        "zero_optimization": zero,
        "bf16": {"enabled": p.dtype == "bfloat16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": p.lr, "betas": [p.beta1, p.beta2], "weight_decay": p.weight_decay, "torch_adam": True},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
