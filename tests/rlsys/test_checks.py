"""What does not fit together in a configuration is refused in one sentence."""

import json

import pytest

from rlsys.config import methods
from rlsys.pipeline import SyncSchedule


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            "trainer.prompts_per_step=10 trainer.updates_per_step=4",
            ["(10)", "(4)", "updates_per_step 5", "prompts_per_step 12"],
        ),
        (
            "trainer.samples_per_prompt=1",
            ["samples_per_prompt is 1", "grpo", "at least 2", "reinforce_pp, remax, raw or gae"],
        ),
        ("trainer.samples_per_prompt=1 algorithm.advantage=rloo", ["samples_per_prompt is 1", "rloo compares"]),
        ("policy.tokens_per_pack=1000 rollout.max_prompt_tokens=512", ["(1000)", "(512)", "= 1024", "at least 1024"]),
        (
            "policy.lr_schedule=linear policy.lr_schedule_steps=50",
            ["lr_schedule_steps (50)", "trainer.steps (100)", "rate of 0", "Use 100 or more, or null"],
        ),
        ("policy.lr_schedule_steps=200", ["lr_schedule_steps is 200", "constant has no end", "=null"]),
        ("models={'Big Judge': {path: 'builtin:tiny'}}", ["models: `Big Judge`", "small letters, digits and _"]),
        ("models={judge: {path: 'builtin:tiny', engines: 0}}", ["models.judge.engines is 0", "1 or more"]),
        ("models={judge: {path: /nowhere/model}}", ["models.judge.path: /nowhere/model/config.json does not exist"]),
        ("models={judge: {path: 'builtin:huge'}}", ["models.judge.path is `builtin:huge`", "the built-in models are"]),
        (
            "reward.functions={judge: {model: grader}}",
            ["reward.functions.judge: `model` is 'grader'", "not in `models` (none)", "models: {judge: {path", "`url`"],
        ),
        ("policy.sequence_parallel=0", ["policy.sequence_parallel is 0"]),
        (
            "policy.sequence_parallel=4 policy.ranks=6",
            ["policy.sequence_parallel (4)", "policy.ranks is 6", "Use policy.ranks 8", "of 1, 2, 3, 6"],
        ),
        (
            "policy.sequence_parallel=2 policy.ranks=2 algorithm.advantage=gae critic.ranks=1",
            ["policy.sequence_parallel (2)", "critic.ranks is 1", "Use critic.ranks 2"],
        ),
        (
            "policy.sequence_parallel=8 policy.ranks=8 model.path=Qwen/Qwen2.5-7B",
            ["(8) does not divide Qwen/Qwen2.5-7B", "28 attention heads, 4 of keys", "may be 1, 2, 4, 28."],
        ),
        ("policy.offload=activations", ["policy.gradient_checkpointing is not true", "Use true"]),
        ("policy.lora.rank=-1", ["policy.lora.rank is -1", "of 0 or more"]),
        ("policy.lora.alpha=64", ["policy.lora.alpha is set", "rank is 0", "such as 32"]),
        ("policy.lora.rank=8", ["policy.lora.alpha is missing", "alpha / rank", "such as 16"]),
        ("policy.lora={rank: 8, alpha: 16, targets: []}", ["targets is empty", "all-linear"]),
        ("policy.lora={rank: 8, alpha: 16, targets: [c_attn]}", ["c_attn matches no linear layer", "q_proj, k_proj"]),
        ("policy.lora={rank: 8, alpha: 16, targets: lm_head}", ["lm_head matches no linear layer", "output layer"]),
        ("model.adapter=here", ["model.adapter is set", "rank is 0"]),
        (
            "policy.lora.rank=8 policy.lora.alpha=16 model.adapter=/nowhere",
            ["/nowhere/adapter_config.json does not exist"],
        ),
        ("reference.refresh_every=5", ["reference.refresh_every is 5", "kl_coef is 0"]),
        (
            "reference.path=builtin:tiny reference.refresh_every=5 reference.kl_coef=0.1",
            ["reference.path (builtin:tiny)", "refresh_every (5)", "Use one of them"],
        ),
        ("reference.path=builtin:tiny", ["reference.path is builtin:tiny", "kl_coef is 0"]),
        ("reference.path=./no_model reference.kl_coef=0.1", ["reference.path: no_model/config.json does not exist"]),
        ("rollout.min_new_tokens=513", ["min_new_tokens (513)", "max_new_tokens (512)"]),
        (
            "rollout.min_new_tokens=8 data.train.builtin:zigzag.max_new_tokens=7",
            ["min_new_tokens (8)", "the 7 tokens of data.train.builtin:zigzag", "Use fewer, or more"],
        ),
        (
            "rollout.min_new_tokens=8 eval.datasets=builtin:zigzag_heldout eval.max_new_tokens=7",
            ["min_new_tokens (8)", "the 7 tokens of eval.datasets.builtin:zigzag_heldout"],
        ),
        ("rollout.stop=['']", ["rollout.stop has an empty text"]),
        ("rollout.stop=end", ["`rollout.stop` must be a list of texts", "'end'"]),
        ("rollout.stop_token_ids=[3,-1]", ["stop_token_ids has -1", "0 or more"]),
        ("rollout.stop_token_ids=[13]", ["stop_token_ids has 13", "13 tokens end at 12"]),
        ("policy.grad_dtype=bfloat16", ["grad_dtype is bfloat16", "dtype float32", "Use grad_dtype float32"]),
        ("policy.zero_stage=4", ["zero_stage is 4", "0, 1, 2 and 3"]),
        ("policy.zero_stage=0 policy.offload=[optimizer]", ["policy.offload optimizer needs", "it is 0"]),
        ("policy.zero_stage=3 policy.compile=true", ["policy.compile works with policy.zero_stage 0, 1 and 2"]),
        ("rollout.exact=true policy.compile=true", ["Use policy.compile false, or rollout.exact false"]),
        ("rollout.exact=true rollout.enforce_eager=false", ["Use rollout.enforce_eager true, or rollout.exact false"]),
        ("policy.offload=params", ["policy.offload params needs policy.zero_stage 3; it is 2"]),
        ("policy.offload=[weights]", ["policy.offload has `weights`", "optimizer, params, activations"]),
        ("pipeline.max_lag=-1", ["max_lag is -1", "0 or more"]),
        ("pipeline.in_flight=true", ["in_flight", "max_lag 0", "Use max_lag 1"]),
        ("pipeline.in_flight=true pipeline.max_lag=1 rollout.oversample=0.5", ["oversample takes", "Use max_lag 2"]),
        ("rollout.oversample=0.5", ["oversample (0.5)", "Use max_lag 1"]),
        ("rollout.oversample=-1", ["oversample is -1", "0 or more"]),
        ("rollout.oversample=3 pipeline.max_lag=1", ["oversample is 3", "at most 1"]),
        (
            "rollout.oversample=0.5 pipeline.max_lag=1 dynamic_sampling.enabled=true",
            ["oversample (0.5)", "dynamic_sampling", "one of them"],
        ),
        ("reward.functions={}", ["reward.functions is empty"]),
        ("reward.functions=exakt", ["`exakt`", "exact, contains, regex, math, code", "Did you mean `exact`?"]),
        ("watchdog.stall_s=10", ["watchdog.stall_s (10) is not more", "(10 s)"]),
        ("reward.functions={zigzag: {deadline_s: 4000}}", ["watchdog.stall_s (1800)", "(4000 s)"]),
        (
            "reward.functions={judge: {url: 'http://x/v1', model: y, timeout_s: 1000}}",
            ["watchdog.stall_s (1800)", "reward.functions.judge may take (2005 s)"],
        ),
        (
            "eval.datasets={x: {path: builtin:zigzag, reward: {zigzag: {deadline_s: 4000}}}}",
            ["eval.datasets.x.reward.zigzag may take (4000 s)"],
        ),
        ("reward.functions={code: {timeout_s: fast}}", ["reward.functions.code", "timeout_s is 'fast'"]),
        ("policy.betas=[1,0.95]", ["policy.betas is [1.0, 0.95]", "less than 1"]),
        ("policy.betas=[0.9,-0.5]", ["policy.betas is [0.9, -0.5]"]),
        ("policy.betas=[0.9]", ["policy.betas is [0.9]", "two numbers"]),
        ("algorithm.advantage=max_rl reward.on_failure=score:-1", ["max_rl", "score:-1", "score: 0"]),
        ("trainer.max_mismatch=0", ["trainer.max_mismatch is 0.0", "null"]),
        ("reward.functions={exact: .inf}", ["weight of exact is inf"]),
        ("reward.max_failure_share=1.5", ["max_failure_share is 1.5"]),
        ("reward.on_failure=zero", ["reward.on_failure is `zero`", "drop, abort, or score: x"]),
        ("reward.on_failure=score:much", ["reward.on_failure is `score:much`"]),
        ("algorithm.advantage=gdpo reward.on_failure=score:0", ["gdpo compares components", "drop or abort"]),
        ("reward.functions={exact: {pattern: x}}", ["reward.functions.exact has no option `pattern`"]),
        ("reward.functions={regex: 1}", ["reward.functions.regex", "pattern"]),
        ("reward.functions={exact: {deadline_s: 0}}", ["reward.functions.exact.deadline_s is 0.0", "above 0"]),
        ("reward.functions={model: {path: x, batch: 0}}", ["`batch` is 0; it must be a number of 1 or more"]),
        ("reward.functions={model: 1}", ["reward.functions.model", "`path` is missing"]),
        ("eval.datasets={x: {path: builtin:zigzag, reward: exakt}}", ["eval.datasets.x.reward is `exakt`"]),
        ("data.train={builtin:zigzag: 1, builtin:zigzag_heldout: null}", ["data.train: the weights are 1.0, None"]),
        ("data.train={builtin:zigzag: 0}", ["data.train: the weights are 0.0", "above 0"]),
        ("eval.samples=4", ["eval.samples is 4, and temperature 0 gives the same completion 4 times"]),
        ("eval.datasets={builtin:zigzag: {samples: 0}}", ["eval.datasets.builtin:zigzag.samples is 0"]),
        ("eval.datasets={builtin:zigzag: {weight: 2}}", ["eval.datasets.builtin:zigzag has a weight"]),
        ("eval.top_p=0 eval.temperature=1", ["eval.top_p is 0", "at most 1"]),
        ("eval.top_k=0 eval.temperature=1", ["eval.top_k is 0", "-1 for all"]),
        ("eval.top_p=0.9", ["eval.top_p=0.9", "temperature 0", "Set eval.temperature"]),
        ("data.template_options={messages: 1}", ["data.template_options has `messages`", "Leave it out"]),
        ("data.train={builtin:zigzag: {template_options: {row: 1}}}", ["builtin:zigzag.template_options has `row`"]),
        (
            "data.train={builtin:zigzag: {max_new_tokens: 513}}",
            ["max_new_tokens is 513", "rollout.max_new_tokens (512)"],
        ),
        (
            "data.train.builtin:zigzag.max_new_tokens=9 overlong.buffer=10",
            ["is 9, less than overlong.buffer (10)"],
        ),
        ("data.template_options=3", ["`data.template_options` must be a mapping"]),
        ("eval.max_new_tokens=0", ["eval.max_new_tokens is 0", "or null"]),
        ("eval.datasets={builtin:zigzag: {max_new_tokens: 0}}", ["builtin:zigzag.max_new_tokens is 0"]),
        ("rollout.gpu_memory=90", ["gpu_memory is 90", "between 0 and 1"]),
        ("rollout.tensor_parallel=2 rollout.enforce_eager=false", ["tensor_parallel is 2", "more engines"]),
        ("rollout.tensor_parallel=2 rollout.exact=true", ["tensor_parallel is 2", "rollout.exact"]),
        ("rollout.temperature=0", ["temperature is 0", "greater than 0"]),
        ("rollout.temperature=.inf", ["temperature is inf"]),
        ("rollout.temperature=.nan", ["temperature is nan"]),
        ("rollout.temperature=0.009", ["rollout.temperature is 0.009", "the trainer would not", "Use 0.01 or more"]),
        ("eval.temperature=1e-6", ["eval.temperature is 1e-06", "Use 0, which is greedy, or 0.01 or more"]),
        (
            "eval.datasets={cold: {path: builtin:zigzag_heldout, temperature: 0.005}}",
            ["eval.datasets.cold.temperature is 0.005", "vLLM would take 0.01"],
        ),
        ("trainer.steps=0", ["trainer.steps is 0", "greater than 0"]),
        ("trainer.updates_per_step=0", ["trainer.updates_per_step is 0"]),
        ("policy.clip_grad=-1", ["policy.clip_grad is -1", "0 or more"]),
        ("run.seed=-1", ["run.seed is -1"]),
        ("algorithm.advantage=gpro", ["`gpro`", "known: grpo", "gae, or module:function", "Did you mean `grpo`?"]),
        ("algorithm.advantage=gea", ["`gea`", "Did you mean `gae`?"]),
        (
            "algorithm.loss=ppo",
            ["`ppo`", "known: ppo_clip", "reinforce, nll, or module:function", "PPO's loss is ppo_clip"],
        ),
        ("algorithm.advantage=GRPO", ["`GRPO`", "Did you mean `grpo`?"]),
        ("algorithm.advantage=Gea", ["`Gea`", "Did you mean `gae`?"]),
        ("algorithm.advantage=PPO", ["`PPO`", "PPO is algorithm.advantage gae"]),
        ("algorithm.advantage=dapo", ["dapo is a recipe of several options: configs/dapo.yaml."]),
        ("algorithm.advantage=gspo", ["gspo is a recipe of several options: configs/gspo.yaml."]),
        ("algorithm.advantage=Dr.GRPO", ["Dr.GRPO is a recipe of several options: configs/dr_grpo.yaml."]),
        ("algorithm.advantage=reinforce++", ["configs/reinforce_pp.yaml."]),
        ("reward.per_token=true algorithm.advantage=gae", ["reward.per_token", "advantage gae compares none"]),
        ("reward.per_token=true algorithm.advantage=remax", ["reward.per_token", "advantage remax compares none"]),
        ("algorithm.control_tokens={<a>: -1}", ["control_tokens has `<a>`: -1", "more than the -1 of a wrong one"]),
        ("algorithm.control_tokens={'': 1}", ["control_tokens has ``: 1", "the text of a token"]),
        ("algorithm.control_tokens={<a>: much}", ["`algorithm.control_tokens` must be a mapping of texts to numbers"]),
        ("algorithm.control_tokens=<a>", ["`algorithm.control_tokens` must be a mapping of texts to numbers"]),
        (
            "algorithm.control_tokens.a=1 reward.on_failure=score:-1",
            ["scores from 0 (wrong) to 1 (right)", "`score:-1`", "Use drop, or score: 0"],
        ),
        ("algorithm={advantage: gdpo, control_tokens: {<a>: 1}}", ["advantage gdpo compares parts of the reward"]),
        ("algorithm={advantage: max_rl, control_tokens: {<a>: 1}}", ["max_rl takes no negative reward"]),
        ("algorithm={advantage: remax, control_tokens: {<a>: 1}}", ["remax compares with the plain score"]),
        ("algorithm.loss=dcpo algorithm.max_ratio=1", ["algorithm.max_ratio is 1", "greater than 1, or null for 10"]),
        ("algorithm.loss=dppo_tv algorithm.max_ratio=0.5", ["max_ratio is 0.5", "truncate them too", "null for 20"]),
        (
            "algorithm.control_tokens.a=1 reward.per_token=true",
            ["wrong answers -1", "long wrong answers would be better", "Use reward.per_token false"],
        ),
        *(
            (
                f"algorithm.loss=advantage_clip algorithm.advantage={advantage}",
                [
                    "far a completion is from its group",
                    f"algorithm.advantage {advantage} does",
                    "grpo, or loss ppo_clip",
                ],
            )
            for advantage in ("raw", "remax", "reinforce_pp", "gae")
        ),
        (
            "algorithm.loss=advantage_clip algorithm.dual_clip=1",
            ["algorithm.dual_clip is 1; it must be greater than 1"],
        ),
        ("algorithm.loss=DeGRPO", ["configs/degrpo.yaml."]),
        ("algorithm.loss=grpo", ["configs/grpo.yaml."]),
        ("algorithm.normalize=seq-mean-token-mean", ["Here that is sequence_mean."]),
        ("algorithm.normalize=token-mean", ["Did you mean `token_mean`?"]),
        ("algorithm.kl=k4", ["`k4`", "k1, k2, k3"]),
        ("algorithm.kl=k3+", ["`k3+`", "Here that is k3_unbiased: the value of k3 with the gradient of k2."]),
        ("algorithm.kl=k1+", ["`k1+`", "In the loss, k2 has the same gradient."]),
        ("algorithm.normalize=mean", ["`mean`", ", ".join(methods.NORMALIZERS)]),
        ("correction.method=tiss", ["`tiss`", "known: auto, none, tis", "Did you mean `tis`?"]),
        ("entropy.control=clip", ["`clip`", "none, clip_cov, kl_cov"]),
        ("reference.kl_in=advantage reference.kl_coef=0.1", ["`advantage`", "loss, reward"]),
        ("algorithm.std=biased", ["`biased`", "sample, population, none"]),
        ("algorithm.std=", ["algorithm.std is ``", "sample, population, none"]),
        ("algorithm.eps=-1", ["algorithm.eps is -1", "0 or more"]),
        ("algorithm.clip_low=.nan", ["algorithm.clip_low is nan", "0 or more"]),
        ("algorithm.loss=sapo algorithm.tau_neg=0", ["tau_neg is 0", "greater than 0"]),
        ("algorithm.dual_clip=1", ["dual_clip is 1", "greater than 1, 0 for no bound"]),
        ("algorithm.normalize=decoupled algorithm.control_weight=-1", ["control_weight is -1", "0 or more"]),
        (
            "algorithm.advantage=rloo algorithm.eps=1e-4",
            ["algorithm.eps is 0.0001", "algorithm.advantage rloo does not use it", "no options"],
        ),
        (
            "algorithm.advantage=max_rl algorithm.std=none",
            ["algorithm.std is none", "max_rl does not use it", "it has algorithm.eps."],
        ),
        (
            "algorithm.loss=gspo algorithm.dual_clip=3",
            ["dual_clip is 3", "gspo does not use it", "algorithm.clip_low, algorithm.clip_high."],
        ),
        ("algorithm.tau_pos=1", ["tau_pos is 1", "ppo_clip does not use it"]),
        ("algorithm.whiten=true", ["algorithm.whiten is True", "grpo does not use it"]),
        ("correction.high=2", ["correction.high is 2", "correction.method none does not use it", "no options"]),
        (
            "algorithm.anchor=rollout correction.method=tis",
            ["algorithm.anchor rollout", "correction.method tis", "again", "Use correction.method none"],
        ),
        (
            "algorithm.loss=reinforce trainer.updates_per_step=2 trainer.epochs_per_step=3",
            ["algorithm.loss reinforce has no ratio", "6 updates", "updates_per_step 1", "such as ppo_clip"],
        ),
        (
            "algorithm.loss=reinforce pipeline.max_lag=2 correction.method=none",
            ["algorithm.loss reinforce has no ratio", "pipeline.max_lag 2", "correction.method auto"],
        ),
        (
            "algorithm.anchor=rollout algorithm.loss=reinforce",
            ["algorithm.loss reinforce has no ratio", "algorithm.anchor old", "such as ppo_clip"],
        ),
        (
            "correction.method=tis correction.low=0.5",
            ["correction.low is 0.5", "tis does not use it", "correction.high."],
        ),
        ("correction.method=icepop correction.low=2 correction.high=1", ["correction.low (2)", "correction.high (1)"]),
        ("correction.method=icepop correction.low=6", ["correction.low (6)", "correction.high (5)", "0.5 and 5"]),
        ("correction.method=icepop correction.high=0.4", ["correction.low (0.5)", "correction.high (0.4)"]),
        ("correction.method=icepop correction.low=1.5", ["correction.low is 1.5", "have the ratio 1", "at most 1, or"]),
        *(
            (
                f"correction.method={method} correction.high=0.5",
                ["high is 0.5, and tokens on which", method, "1 or more"],
            )
            for method in ("tis", "mis", "sequence_tis", "sequence_mis")
        ),
        ("correction.method=icepop correction.high=0.9", ["correction.high is 0.9", "Use 1 or more, or null"]),
        ("pipeline.max_lag=1 correction.high=0", ["correction.high is 0", "correction.method tis would change them"]),
        (
            "algorithm.advantage=gae trainer.steps=5 critic.alone_steps=5",
            ["critic.alone_steps (5)", "trainer.steps (5)", "never learn"],
        ),
        ("entropy.control=kl_cov", ["kl_cov", "no gradient", "Use 2 updates, or clip_cov"]),
        (
            "algorithm.advantage=gdpo reference.kl_in=reward reference.kl_coef=0.1",
            ["gdpo", "kl_coef (0.1)", "kl_in loss"],
        ),
        ("reward.functions={exact: 1, 'json:exact': 1}", ["2 functions called exact", "different names"]),
        ("algorithm.constant=5", ["algorithm.constant is 5", "normalize token_mean does not use it", "=0."]),
        *(
            (
                f"algorithm.normalize=decoupled algorithm.control_weight=0 {term}",
                ["control_weight is 0", "one token", "1e-6"],
            )
            for term in ("reference.kl_coef=0.1", "entropy.coef=0.1")
        ),
        ("algorithm.control_weight=1", ["control_weight is 1", "normalize=decoupled", "=0.001."]),
        ("reference.kl_target=0.1", ["kl_target is 0.1", "kl_coef is 0"]),
        (
            "dynamic_sampling.enabled=true trainer.samples_per_prompt=1 algorithm.advantage=json.decoder:f",
            ["dynamic_sampling", "samples_per_prompt 1", "every group"],
        ),
        *(
            (
                f"dynamic_sampling.enabled=true algorithm.advantage={advantage}",
                [f"advantage {advantage} they teach too", "dynamic_sampling.enabled false", "such as rloo"],
            )
            for advantage in ("raw", "remax", "reinforce_pp", "gae")
        ),
        ("dynamic_sampling.enabled=true reward.per_token=true", ["reward.per_token they teach too, by their lengths"]),
        (
            "dynamic_sampling.enabled=true reference.kl_in=reward reference.kl_coef=0.1",
            ["reference.kl_in reward they teach too, by their KL", "enabled false, or kl_in loss"],
        ),
        (
            "dynamic_sampling.enabled=true algorithm.advantage=reinforce_pp_baseline",
            ["they teach too, by a mean over tokens", "enabled false, or whiten_over samples"],
        ),
        (
            "reference.kl_coef=0.01 algorithm.kl=k1",
            ["algorithm.kl k1 in the loss", "0 on average", "k3, k2 or k3_unbiased", "reference.kl_in reward"],
        ),
        *(
            (
                f"algorithm.loss={loss} algorithm.normalize={normalize}",
                [f"algorithm.normalize {normalize}", f"algorithm.loss {loss}", "auto, which is sequence_mean"],
            )
            for loss in ("gspo", "gmpo")
            for normalize in ("token_mean", "sequence_sum", "constant", "decoupled")
        ),
        *(
            (f"algorithm.loss=gmpo {option}", [named, "algorithm.loss gmpo multiplies", "ppo_clip"])
            for option, named in (
                ("algorithm.advantage=gae", "algorithm.advantage gae"),
                ("algorithm.credit=turn", "algorithm.credit turn"),
                ("entropy.control=clip_cov", "entropy.control clip_cov"),
            )
        ),
        (
            "algorithm.control_tokens.a=1 algorithm.credit=turn",
            ["algorithm.control_tokens rewards the mode", "algorithm.credit turn", "credit episode"],
        ),
        (
            "dynamic_sampling.enabled=true algorithm.control_tokens.a=1",
            ["dynamic_sampling.enabled", "algorithm.control_tokens", "by their modes"],
        ),
        (
            "dynamic_sampling.enabled=true algorithm.credit=turn",
            ["dynamic_sampling.enabled", "algorithm.credit turn", "by their turns"],
        ),
        ("dynamic_sampling.max_rounds=0", ["max_rounds is 0", "greater than 0"]),
        ("overlong.buffer=513", ["overlong.buffer (513)", "rollout.max_new_tokens (512)"]),
        (
            "overlong.buffer=9 episode.tools=[python]",
            [
                "overlong.buffer (9)",
                "one turn of an episode, not its 8 turns",
                "overlong.buffer 0, or episode.max_turns 1",
            ],
        ),
        ("overlong.buffer=9 overlong.penalty=-1", ["overlong.penalty is -1", "0 or more"]),
        ("algorithm.advantage=max_rl overlong.buffer=9", ["max_rl", "0 or more", "overlong.buffer 0"]),
        (
            "algorithm.advantage=max_rl reference.kl_in=reward reference.kl_coef=0.1",
            ["max_rl", "0 or more", "reference.kl_in loss"],
        ),
        ("entropy.share=1.5", ["entropy.share is 1.5", "between 0 and 1"]),
        ("entropy.control=clip_cov entropy.share=0", ["entropy.share is 0", "take no token", "null, or"]),
        ("algorithm.advantage=gae critic.gamma=1.01", ["critic.gamma is 1.01", "between 0 and 1"]),
        ("algorithm.advantage=gae critic.lam=1.01", ["critic.lam is 1.01", "between 0 and 1"]),
        ("algorithm.advantage=gae critic.clip=-1", ["critic.clip is -1", "0 or more"]),
        ("algorithm.advantage=gae critic.lr=0", ["critic.lr is 0", "greater than 0"]),
        ("sync.transport=nccl", ["nccl needs GPUs", "auto"]),
        ("sync.transport=carrier_pigeon", ["`carrier_pigeon`", "shared_memory"]),
        ("cluster.device=tpu", ["cluster.device is `tpu`"]),
        ("cluster.placement=colocated", ["colocated shares GPUs"]),
        ("cluster.device=gpu cluster.placement=colocated rollout.engines=4 policy.ranks=2", ["(4)", "(2)"]),
        ("cluster.device=gpu cluster.placement=colocated pipeline.max_lag=1", ["max_lag 1"]),
        (
            "cluster.device=gpu cluster.placement=colocated algorithm.advantage=gae critic.ranks=3",
            ["critic.ranks (3)", "policy.ranks (2)"],
        ),
        (
            "cluster.device=gpu cluster.placement=colocated cluster.env.PYTORCH_ALLOC_CONF=expandable_segments:True",
            ["PYTORCH_ALLOC_CONF", "cannot open"],
        ),
        ("cluster.env={CUDA_VISIBLE_DEVICES: 0}", ["CUDA_VISIBLE_DEVICES", "Leave it out"]),
        ("cluster.device=gpu sync.transport=cuda_ipc", ["cuda_ipc", "colocated"]),
        ("cluster.device=gpu sync.transport=nccl cluster.placement=colocated", ["nccl", "use cuda_ipc"]),
        (
            "model.path=builtin:huge",
            ["builtin:huge", "builtin:tiny, builtin:untrained, builtin:two_modes, builtin:guess, builtin:calculator"],
        ),
        ("model.path=./no_model", ["no_model/config.json does not exist"]),
        ("data.train=gone.jsonl", ["data.train: gone.jsonl does not exist", "from /"]),
        ("data.train=builtin:zagzig", ["data.train: builtin:zagzig does not exist", "builtin:zigzag"]),
        ("data.train=some.yaml", ["some.yaml must end in .jsonl", "or .parquet"]),
        ("eval.datasets=gone.parquet", ["eval.datasets: gone.parquet does not exist"]),
        ("reward.functions=gone.py:f", ["the file gone.py (of `gone.py:f`) does not exist"]),
        ("reward.functions='os:'", ["names no function", "os:my_function"]),
        ("reward.functions=[os:]", ["names no function"]),
        ("algorithm.advantage=gone.py:f", ["algorithm.advantage: the file gone.py"]),
        ("algorithm.loss=gone.py:f", ["algorithm.loss: the file gone.py"]),
    ],
)
def test_each_problem_is_one_sentence_with_the_numbers(refused, overrides, parts):
    found = refused("", *overrides.split(" ") if "{" not in overrides else [overrides])
    hits = [sentence for sentence in found if all(part in sentence for part in parts)]
    assert len(hits) == 1, found
    assert len(found) == 1, found
    assert hits[0].endswith((".", "?", ")."))


def test_a_length_penalty_goes_with_episodes_of_one_turn_and_with_those_of_evaluations(read):
    evaluated = "eval.datasets={zigzag: {path: builtin:zigzag_heldout, episode: tools}}"
    for options in (["episode.tools=[python]", "episode.max_turns=1"], [evaluated, "episode.max_turns=2"]):
        assert read("", "overlong.buffer=9", *options).overlong.buffer == 9


def test_all_problems_are_reported_at_once(refused):
    found = refused(
        "", "rollout.gpu_memory=2", "algorithm.kl=k4", "data.train=gone.jsonl", "trainer.samples_per_prompt=1"
    )
    assert len(found) == 4


def test_a_user_function_may_take_the_place_of_a_built_in_one(read):
    assert (
        read("", "algorithm.advantage=json.decoder:f", "trainer.samples_per_prompt=1").algorithm.advantage
        == "json.decoder:f"
    )


@pytest.mark.parametrize("advantage", ["reinforce_pp", "remax", "raw", "gae"])
def test_one_sample_per_prompt_is_enough_for_methods_that_do_not_compare(read, advantage):
    assert read("", f"algorithm.advantage={advantage}", "trainer.samples_per_prompt=1").trainer.samples_per_prompt == 1


def test_a_value_clip_of_zero_is_none(read):
    assert read("", "algorithm.advantage=gae", "critic.clip=0").critic.clip == 0


def test_kl_cov_takes_a_second_update_or_a_second_pass(read):
    for more in ("trainer.updates_per_step=2", "trainer.epochs_per_step=2"):
        assert read("", "entropy.control=kl_cov", more).entropy.control == "kl_cov"


def test_a_user_function_may_ask_for_options_of_token_weights(read):
    found = read("", "algorithm.loss=json.decoder:f", "algorithm.constant=5", "algorithm.control_weight=1").algorithm
    assert (found.constant, found.control_weight) == (5, 1)


def test_a_user_function_may_have_any_option_there_is(read):
    assert (
        read("", "algorithm.advantage=json.decoder:f", "algorithm.eps=0.5", "algorithm.whiten=true").algorithm.eps
        == 0.5
    )


def test_a_colocated_gpu_run_is_accepted(read):
    overrides = ["cluster.device=gpu", "cluster.placement=colocated", "rollout.engines=4", "policy.ranks=4"]
    assert read("", *overrides, "sync.transport=cuda_ipc").cluster.placement == "colocated"


def test_colocated_engines_may_over_sample_if_none_samples_during_training(read, refused):
    shared = ["cluster.device=gpu", "cluster.placement=colocated", "rollout.engines=2", "policy.ranks=2"]
    shared += ["rollout.oversample=0.25"]
    config = read("", *shared, "pipeline.max_lag=1")
    timetable = SyncSchedule.from_config(config)
    assert [timetable.last_startable_step(step) for step in (1, 2, 3)] == [1, 2, 3], (
        "each batch is begun when the one before is trained"
    )
    [found] = refused("", *shared, "pipeline.max_lag=2")
    assert found.endswith("Use placement separate, or max_lag 1.")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()

    def write(text: str) -> str:
        (folder / "config.json").write_text(text)
        return f"model.path={folder}"

    return write


def test_a_model_whose_window_is_too_small_is_refused_with_the_difference(refused, read, model):
    prompts = "rollout.max_prompt_tokens=512"
    [found] = refused("", model(json.dumps({"max_position_embeddings": 1000})), prompts)
    assert "= 1024" in found
    assert "window is 1000 tokens" in found
    assert "by 24" in found
    assert read("", model(json.dumps({"max_position_embeddings": 1024})), prompts).model.path
    assert read("", model(json.dumps({"max_position_embeddings": 1000}))).model.path
    assert read("", model("{}")).model.path
    evaluated = ["eval.max_new_tokens=600", "eval.datasets={builtin:zigzag: {max_new_tokens: 700}}"]
    found = refused("", model(json.dumps({"max_position_embeddings": 1024})), prompts, *evaluated)
    assert ["eval.max_new_tokens (600) = 1112" in found[0], "by 88" in found[0]] == [True, True]
    assert ["zigzag.max_new_tokens (700) = 1212" in found[1], "by 188" in found[1]] == [True, True]


def test_a_stop_token_beyond_the_vocabulary_is_refused_for_any_architecture(refused, read, model):
    for family in ("qwen2", "arcee"):  # the shape of the second is not known
        settings = {"model_type": family, "vocab_size": 100, "hidden_size": 32, "num_attention_heads": 1}
        assert refused("rollout: {stop_token_ids: [5, 100]}", model(json.dumps(settings))) == [
            "rollout.stop_token_ids has 100, and the model's 100 tokens end at 99. Correct it, or leave it out."
        ]


def test_heads_that_vllm_does_not_compute_on_cpus_are_refused(refused, read, model):
    narrow = {"hidden_size": 64, "num_attention_heads": 4}
    [found] = refused("", model(json.dumps(narrow)))
    assert "attention heads of 16 numbers do not run in vLLM's CPU build; these do: 32, 64, 80" in found
    for runs in (narrow | {"head_dim": 32}, narrow | {"hidden_size": 128}, narrow | {"kv_lora_rank": 16}):
        assert read("", model(json.dumps(runs))).model.path


def test_models_that_engines_cannot_run_are_refused_on_the_device_that_cannot(refused, read, model):
    mamba = json.dumps({"model_type": "jamba", "hidden_size": 128, "num_attention_heads": 4})
    [found] = refused("", model(mamba))
    assert "cannot run jamba models: it has no kernel for Mamba" in found
    assert found.endswith("Use another model, or cluster.device=gpu.")
    gpu = ("cluster.device=gpu", "sync.verify=false")
    assert read("", model(mamba), *gpu).model.path
    [found] = refused("", model(json.dumps({"model_type": "bamba"})), *gpu)
    assert found.endswith("vLLM has no class for bamba models. Use another model.")
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    [found] = refused("", model(json.dumps(latent)))
    assert "latent attention with 24 numbers of a token" in found
    assert read("", model(json.dumps(latent | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}))).model.path
    mamba2 = model(json.dumps({"model_type": "falcon_h1", "hidden_size": 128, "num_attention_heads": 4}))
    assert refused("", mamba2)[0].endswith("Use sync.verify=false, or another model.")
    assert read("", mamba2, "sync.verify=false").model.path
    assert (
        "scales the weights of norms" in refused("", model('{"model_type": "longcat_flash"}'), "cluster.device=gpu")[0]
    )
    some = {"model_type": "gemma4_text", "hidden_size": 128, "num_attention_heads": 4, "global_head_dim": 48}
    assert "heads of 48 numbers" in refused("", model(json.dumps(some)))[0]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_model_that_draws_experts_while_it_is_trained_is_refused_as_policy_and_reference(refused, model, device):
    path = model(json.dumps({"model_type": "phimoe", "hidden_size": 128, "num_attention_heads": 4}))
    [found] = refused("", path, f"cluster.device={device}")
    assert "model.path: phimoe models draw experts at random while they are trained" in found
    reference = path.replace("model.path", "reference.path")
    assert "reference.path: phimoe models draw" in refused("", reference, "reference.kl_coef=0.1")[0]


@pytest.mark.parametrize(
    ("options", "method"), [({"quant_method": "fp8"}, "fp8"), ({"bits": 4}, "unknown method"), ("awq", "awq")]
)
def test_a_model_whose_weights_are_quantized_is_refused_as_policy_and_reference(refused, model, options, method):
    path = model(json.dumps({"model_type": "qwen3", "quantization_config": options}))
    [found] = refused("", path)
    assert found.startswith(f"model.path: its weights are quantized ({method})")
    [found, *_] = refused("", path.replace("model.path", "reference.path"), "reference.kl_coef=0.1")
    assert found.startswith(f"reference.path: its weights are quantized ({method})")


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "llama4", "mistral3"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_model_of_text_and_images_is_refused(refused, tmp_path, family, device):
    """As policy, and as reference."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    words = f"{family} models take images or sound too, and rlsys trains models of text alone. Keep the text model: rlsys import"
    problems = refused("", f"model.path={tmp_path}", f"cluster.device={device}")
    assert any(problem.startswith(f"model.path: {words}") for problem in problems)
    problems = refused("", "reference.kl_coef=0.1", f"reference.path={tmp_path}", f"cluster.device={device}")
    assert any(problem.startswith(f"reference.path: {words}") for problem in problems)


def test_the_head_sizes_are_those_of_the_installed_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    from rlsys.models.support import CPU_HEAD_SIZES, CPU_LATENT_SIZES

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    assert list(CPU_LATENT_SIZES) == CPUMLABackend.get_supported_head_sizes()


def test_a_hub_models_window_is_from_its_config_or_for_a_plan_from_its_name(read, tmp_path, monkeypatch):
    from rlsys.checks import check
    from rlsys.models.lookup import known_model_shape

    lengths = ["rollout.max_prompt_tokens=1024", "rollout.max_new_tokens=3500"]
    config = read("", "model.path=Qwen/Qwen2.5-Math-7B", "policy.tokens_per_pack=8192", *lengths)
    assert check(config) == [], "train asks the config.json when it has come"
    [found] = check(config, known_model_shape(config.model.path))
    assert "= 4524, but the model's window is 4096 tokens. Reduce one of them by 428." in found
    assert found.endswith("hf download Qwen/Qwen2.5-Math-7B config.json")
    unbound = read("", "model.path=Qwen/Qwen2.5-Math-7B", "rollout.max_new_tokens=4000")
    assert check(unbound, known_model_shape(unbound.model.path)) == [], "prompts take what is left, as in training"
    folder = tmp_path / "hub" / "models--Qwen--Qwen2.5-Math-7B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "window is 2048 tokens. Reduce one of them by 2476." in check(config)[0]


@pytest.mark.parametrize(
    ("path", "wide", "good"),
    [
        ("builtin:tiny", 3, "1, 2, 4"),
        ("Qwen/Qwen2.5-7B", 7, "1, 2, 4"),
        ("Qwen/Qwen2.5-0.5B", 4, "1, 2"),
        ("meta-llama/Llama-3.1-8B", 3, "1, 2, 4, 8, 16, 32"),
    ],
)
def test_tensor_parallelism_must_divide_the_models_heads(refused, path, wide, good):
    [found] = refused("", f"model.path={path}", f"rollout.tensor_parallel={wide}")
    assert found.startswith(f"rollout.tensor_parallel ({wide}) does not divide {path}: ")
    assert found.endswith(f" It may be {good}.")


def test_the_heads_of_a_model_are_read_where_it_is(read, refused, model):
    shape = {"model_type": "llama", "hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 6}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 8}
    [found] = refused("", model(json.dumps(shape)), "rollout.tensor_parallel=3")
    assert found.endswith("6 attention heads, 2 of keys and values, an MLP of 96. It may be 1, 2, 6.")
    assert read("", model(json.dumps(shape | {"model_type": "abacus"})), "rollout.tensor_parallel=3").model.path


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_model_directory_is_refused(refused, model, text):
    [found] = refused("", model(text))
    assert "config.json is not a JSON object" in found


def test_gdpo_wants_the_same_reward_functions_for_every_data_set(refused):
    found = refused("", "algorithm.advantage=gdpo", "data.train={builtin:zigzag: {reward: exact}}")
    assert "gdpo compares the same components" in found[0]
    assert "reward of its own" in found[0]


def test_a_set_in_training_and_evaluation_has_one_reward_or_two_names(refused):
    found = refused("", "eval.datasets={builtin:zigzag: {reward: exact}}")
    assert "both have a set builtin:zigzag, with different reward functions" in found[0]
