"""What somebody may have meant who wrote an option that there is not: a name from another system, or one that is spelt nearly so."""

import dataclasses
import difflib
from typing import Any

from rlsys.config.schema import Config

# What verl, TRL and OpenRLHF call our options, by the last part of the name, or the last two where one would lead astray.
# configs/MIGRATING.md says where the values differ.
ELSEWHERE = {
    "adv_estimator": "algorithm.advantage",
    "norm_adv_by_std_in_grpo": "algorithm.std",
    "scale_rewards": "algorithm.std",
    "cliprange": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "delta": "algorithm.dual_clip",
    "importance_sampling_level": "algorithm.loss",
    "loss_mode": "algorithm.loss",
    "loss_agg_mode": "algorithm.normalize",
    "loss_type": "algorithm.normalize",
    "kl_loss_type": "algorithm.kl",
    "kl_penalty": "algorithm.kl",
    "beta": "reference.kl_coef",
    "kl_loss_coef": "reference.kl_coef",
    "init_kl_coef": "reference.kl_coef",
    "use_kl_in_reward": "reference.kl_in",
    "target_kl": "reference.kl_target",
    "horizon": "reference.kl_horizon",
    "entropy_coef": "entropy.coef",
    "entropy_coeff": "entropy.coef",
    "mask_truncated_completions": "overlong.mask",
    "overlong_buffer": "overlong.buffer",
    "filter_groups": "dynamic_sampling.enabled",
    "max_num_gen_batches": "dynamic_sampling.max_rounds",
    "n": "trainer.samples_per_prompt",
    "num_generations": "trainer.samples_per_prompt",
    "train_batch_size": "trainer.prompts_per_step",
    "ppo_mini_batch_size": "trainer.updates_per_step",
    "ppo_epochs": "trainer.epochs_per_step",
    "num_iterations": "trainer.epochs_per_step",
    "max_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "save_total_limit": "checkpoint.keep_last",
    "max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory",
    "tensor_model_parallel_size": "rollout.tensor_parallel",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "learning_rate": "policy.lr",
    "grad_clip": "policy.clip_grad",
    "max_grad_norm": "policy.clip_grad",
    "cliprange_value": "critic.clip",
    "critic_warmup": "critic.alone_steps",
    "custom_reward_function": "reward.functions",
    "reward_manager": "reward.functions",
    "reward_model": "reward.functions",
    "sandbox_fusion": "reward.functions",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "reward_model_path": "reward.functions",
    "reward_pretrain": "reward.functions",
    "remote_rm_url": "reward.functions",
    "train_files": "data.train",
    "train_dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_config": "data.train",
    "dataset_train_split": "data.train",
    "prompt_data": "data.train",
    "prompt_data_probs": "data.train",
    "prompt_split": "data.train",
    "input_key": "data.prompt_key",
    "label_key": "data.answer_key",
    "system_prompt": "data.system",
    "input_template": "data.template",
    "apply_chat_template": "data.as_chat",
    "shuffle_dataset": "data.shuffle",
    "filter_overlong_prompts": "data.overlong",
    "truncation": "data.overlong",
    "val_files": "eval.datasets",
    "eval_dataset": "eval.datasets",
    "eval_split": "eval.datasets",
    "dataset_test_split": "eval.datasets",
    "test_freq": "eval.every",
    "val_before_train": "eval.every",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "eval_on_start": "eval.every",
    "val_kwargs": "eval.samples",
    "val_kwargs.n": "eval.samples",
    "num_generations_eval": "eval.samples",
    "eval_n_samples_per_prompt": "eval.samples",
    "val_kwargs.temperature": "eval.temperature",
    "do_sample": "eval.temperature",
    "eval_temperature": "eval.temperature",
    "rollout_data_dir": "run.dir",
    "validation_data_dir": "run.dir",
    "log_completions": "run.dir",
    "freezing_actor_steps": "critic.alone_steps",
    "advantage_estimator": "algorithm.advantage",
    "no_advantage_std_norm": "algorithm.std",
    "policy_loss_type": "algorithm.loss",
    "eps_clip": "algorithm.clip_low",
    "eps_clip_low_high": "algorithm.clip_low",
    "kl_estimator": "algorithm.kl",
    "use_kl_loss": "reference.kl_in",
    "entropy_loss_coef": "entropy.coef",
    "overlong_buffer_len": "overlong.buffer",
    "overlong_penalty_factor": "overlong.penalty",
    "penalty_factor": "overlong.penalty",
    "dynamic_filtering": "dynamic_sampling.enabled",
    "rollout_is": "correction.method",
    "vllm_importance_sampling_correction": "correction.method",
    "enable_vllm_is_correction": "correction.method",
    "rollout_is_threshold": "correction.high",
    "tis_imp_ratio_cap": "correction.high",
    "vllm_importance_sampling_mode": "correction.method",
    "vllm_importance_sampling_clip_max": "correction.high",
    "vllm_importance_sampling_cap": "correction.high",
    "vllm_is_truncated_threshold": "correction.high",
    "rollout_batch_size": "trainer.prompts_per_step",
    "n_samples_per_prompt": "trainer.samples_per_prompt",
    "max_epochs": "trainer.epochs_per_step",
    "max_ckpt_num": "checkpoint.keep_last",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "prompt_max_len": "rollout.max_prompt_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "vllm_num_engines": "rollout.engines",
    "hybrid_engine": "cluster.placement",
    "vllm_mode": "cluster.placement",
    "colocate_all_models": "cluster.placement",
    "async_train": "pipeline.max_lag",
    "async_queue_size": "pipeline.max_lag",
    "actor_learning_rate": "policy.lr",
    "critic_learning_rate": "critic.lr",
    "max_norm": "policy.clip_grad",
    "l2": "policy.weight_decay",
    "ppo_max_token_len_per_gpu": "policy.tokens_per_pack",
    "train_max_tokens_per_gpu": "policy.tokens_per_pack",
    "use_torch_compile": "policy.compile",
    "torch_compile": "policy.compile",
    "optimizer_offload": "policy.offload_optimizer",
    "adam_offload": "policy.offload_optimizer",
    "lambd": "critic.lam",
    "value_clip": "critic.clip",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "logger": "tracking.to",
    "report_to": "tracking.to",
    "use_wandb": "tracking.to",
    "use_tensorboard": "tracking.to",
    "project_name": "tracking.to",
    "wandb_project": "tracking.to",
    "default_local_dir": "run.dir",
    "output_dir": "run.dir",
    "ckpt_path": "run.dir",
    "save_path": "run.dir",
    "experiment_name": "run.dir",
    "run_name": "run.dir",
    "wandb_run_name": "run.dir",
    "generation_batch_size": "trainer.prompts_per_step",
    "per_device_train_batch_size": "trainer.prompts_per_step",
    "steps_per_generation": "trainer.updates_per_step",
    "gradient_accumulation_steps": "trainer.updates_per_step",
    "advantage.estimator": "algorithm.advantage",
    "kl.init_coef": "reference.kl_coef",
    "kl.use_loss": "reference.kl_in",
    "rollout.batch_size": "trainer.prompts_per_step",
    "train.batch_size": "trainer.updates_per_step",
    "train.async_enable": "pipeline.max_lag",
    "train.colocate_all": "cluster.placement",
    "vllm.num_engines": "rollout.engines",
    "reward.remote_url": "reward.functions",
    "prompt_dataset": "data.train",
    "eval.steps": "eval.every",
    "eval.n_samples_per_prompt": "eval.samples",
    "ckpt.path": "run.dir",
    "ckpt.max_num": "checkpoint.keep_last",
}


def option_names(kind: Any = Config, prefix: str = "") -> list[str]:
    """Every option's dotted name."""
    names = []
    for f in dataclasses.fields(kind):
        names += option_names(f.type, f"{prefix}{f.name}.") if dataclasses.is_dataclass(f.type) else [prefix + f.name]
    return names


def suggest_option(key: str) -> str:
    """A sentence for the end of the message."""
    if key == "base":
        return " It belongs in a YAML file, on a line such as `base: tiny_cpu.yaml`."
    ours, leaf = [*option_names(), "base"], key.rpartition(".")[2]
    alike = [o for o in ours if o.rpartition(".")[2] == key]
    if len(alike) > 1:  # a section is missing, and who knows which
        return f" Did you mean one of {', '.join(f'`{o}`' for o in alike)}?"
    found = (
        translate_option(key)
        or closest_option(key, [o for o in ours if o.rpartition(".")[2] == leaf])
        or next(iter(difflib.get_close_matches(key, ours, 1, 0.7)), None)
        or next((o for o in ours if difflib.get_close_matches(leaf, [o.rpartition(".")[2]], 1, 0.8)), None)
    )
    return f" Did you mean `{found}`?" if found else " `rlsys validate --options` lists them all."


def translate_option(key: str) -> str | None:
    """Ours for a name from elsewhere, which its last known part decides.  "reward_model.path" -> "reward.functions" """
    parts = key.split(".")
    names = [name for i in reversed(range(len(parts))) for name in (".".join(parts[i - 1 : i + 1]), parts[i])]
    return next((ELSEWHERE[name] for name in names if name in ELSEWHERE), None)


def closest_option(key: str, among: list[str]) -> str | None:
    """Of options of that name in several sections: the one whose section is spelt nearly so, or the first."""
    return next(iter(difflib.get_close_matches(key, among, 1, 0.7) or among), None)
