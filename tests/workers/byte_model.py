"""A model whose tokens are bytes, with a chat template and a window of 4,096: what it reads and writes can be read."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = Path(__file__).parents[1] / "rlsys" / "episodes" / "templates" / "qwen2_5.jinja"
END = 256  # the token that ends a turn


def byte_tokenizer() -> Any:
    """A token for each byte, and the tokens of turns and of reasoning."""
    tokenizer = Tokenizer(
        models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_tokens(["<think>", "</think>"])
    fast.chat_template = TEMPLATE.read_text()
    return fast


def write_byte_model(folder: Path, model: str, window: int = 4096) -> Path:
    """Writes the tokenizer, and the configuration of another model with its size."""
    tokenizer = byte_tokenizer()
    config = json.loads((Path(model) / "config.json").read_text())
    own = {"vocab_size": len(tokenizer), "max_position_embeddings": window, "eos_token_id": END}
    (folder / "config.json").write_text(json.dumps(config | own))
    tokenizer.save_pretrained(folder)
    return folder
