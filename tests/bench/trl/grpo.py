"""TRL's side of the comparison, in TRL's own environment: trains some steps and writes when each of them ended.

    python grpo.py '{"model": …, "prompts": …, "out": …, "steps": 12, "threads": 2, "micro": 128, "new_tokens": 128}'

With `torchrun --nproc-per-node 2` on two processes, which share the batch.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from reward import brevity_for_trl
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAMPLES, GROUP = 128, 8


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **row: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return brevity_for_trl(completion_ids, **row)

    processes = settings["processes"]
    config = GRPOConfig(
        output_dir=settings["out"] + ".dir",
        use_cpu=True,
        bf16=False,
        seed=settings["seed"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["micro"] // processes,
        gradient_accumulation_steps=SAMPLES // settings["micro"],  # one optimizer update, and one generation, per step
        num_generations=GROUP,
        max_completion_length=settings["new_tokens"],
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-30,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        gradient_checkpointing=False,  # TRL's default is true, which costs a second forward pass
        torch_compile=settings.get("compile", False),
        generation_kwargs={"use_cache": True},
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    stopwatch = Stopwatch()
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=settings["prompts"], split="train"),
        callbacks=[stopwatch],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        results = {"ends": stopwatch.ends, "length": sum(lengths) / len(lengths)}
        Path(settings["out"]).write_text(json.dumps(results))
    trainer.accelerator.end_training()  # several processes that just end sometimes abort
    sys.stdout.flush()
    os._exit(0)  # or wait for ever, in a thread of some library


if __name__ == "__main__":
    main()
