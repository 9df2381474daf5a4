"""The reward `model`: a sequence-classification model scores prompt and completion. It runs in a worker of its own."""

import functools
from collections.abc import Sequence
from typing import Any

from rlsys.errors import ConfigError

Message = dict[str, Any]


def model(
    prompts: list[str],
    completions: list[str],
    messages: list[Any],
    transcripts: Sequence[Any] | None = None,
    *,
    path: str,
    dtype: str = "float32",
    gpus: float = 0.0,
    batch: int = 16,
    max_tokens: int = 0,
    label: int = 0,
) -> list[float]:
    """The model's logit of `label` for the chat that ends in the completion, or for the plain prompt and completion.

    Of an episode it reads the transcript.

    `path` is a directory or hub name; `gpus` is what its worker takes (0: it runs on the CPU). Texts longer than
    `max_tokens` (0: the model's context) lose their beginning.
    """
    reward_model = load_model(path, dtype, bool(gpus))
    transcripts = transcripts or [None] * len(prompts)
    texts = [reward_model.chat_text(*own) for own in zip(prompts, completions, messages, transcripts, strict=True)]
    return reward_model.score_texts(texts, batch=batch, max_tokens=max_tokens, label=label)


class RewardModel:
    """A loaded sequence-classification model with its tokenizer."""

    def __init__(self, path: str, dtype: str, on_gpu: bool):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.torch, self.device = torch, "cuda" if on_gpu else "cpu"
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                path, padding_side="right", truncation_side="left", trust_remote_code=False
            )
            model = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, dtype), trust_remote_code=False
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"reward model: {path} cannot be loaded: {type(error).__name__}: {reason}") from error
        self.model = model.to(self.device).eval().requires_grad_(False)
        settings = self.model.config.get_text_config()
        settings.use_cache = False  # nothing is generated, so keys and values would only take memory
        self.context = getattr(settings, "max_position_embeddings", 0) or 1 << 30  # not every architecture has one
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if settings.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id

    def chat_text(
        self, prompt: str, completion: str, messages: list[Message] | None, transcript: list[Message] | None = None
    ) -> str:
        if not self.tokenizer.chat_template or not messages:
            return prompt + completion
        chat = transcript or [*messages, {"role": "assistant", "content": completion}]
        return str(self.tokenizer.apply_chat_template(chat, tokenize=False))

    def score_texts(self, texts: Sequence[str], *, batch: int, max_tokens: int, label: int) -> list[float]:
        """Scores texts in batches of similar length, so that little is padded.  [N] -> [N]"""
        longest = min(max_tokens or self.context, self.context)
        special = not self.tokenizer.chat_template
        tokens = [self.tokenizer(t, truncation=True, max_length=longest, add_special_tokens=special) for t in texts]
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]["input_ids"]))
        scores = [0.0] * len(texts)
        for first in range(0, len(order), batch):
            indices = order[first : first + batch]
            padded = self.tokenizer.pad([tokens[i] for i in indices], return_tensors="pt").to(self.device)
            with self.torch.no_grad():
                logits = self.model(**padded).logits.float()  # [batch, labels]
            if label >= logits.shape[1]:
                raise ConfigError(
                    f"reward model: label is {label}, but the model has {logits.shape[1]} labels, from 0 on."
                )
            for i, score in zip(indices, logits[:, label].tolist(), strict=True):
                scores[i] = score
        return scores


@functools.lru_cache(maxsize=4)
def load_model(path: str, dtype: str, on_gpu: bool) -> RewardModel:
    return RewardModel(path, dtype, on_gpu)


def check_model(options: dict[str, Any]) -> None:
    if not options.get("path"):
        raise ConfigError("`path` is missing: the reward model's directory or hub name.")
    if options.get("dtype", "float32") not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"`dtype` is {options['dtype']!r}; it may be float32, bfloat16 or float16.")

    for name, least in (("batch", 1), ("max_tokens", 0), ("label", 0), ("gpus", 0)):
        value = options.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ConfigError(f"`{name}` is {value!r}; it must be a number of {least} or more.")


def prepare(options: dict[str, Any]) -> None:
    """Loads the model before the first sample."""
    load_model(options["path"], options.get("dtype", "float32"), bool(options.get("gpus", 0.0)))
