"""Models for benchmarks: random weights in Qwen2's architecture and any size, and Gemma 3 270M as `make real` installs it."""

import json
import math
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 64
PROMPT = 16  # tokens


@dataclass(frozen=True)
class Case:
    hidden: int
    inner: int
    layers: int
    heads: int
    new_tokens: int
    end: float  # probability of the end at each token


@dataclass(frozen=True)
class Gemma:
    new_tokens: int
    folder: Path = Path(__file__).parents[2] / "models" / "gemma-3-270m"


CASES = {"8m": Case(256, 1024, 8, 8, 128, 1 / 72), "small": Case(128, 384, 3, 4, 32, 0.0)}


GEMMA_CASES = {"gemma": Gemma(4), "gemma64": Gemma(64)}


def random_model(**sizes: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(pad_token_id=0, eos_token_id=1, bos_token_id=None, dtype="float32", **sizes))


def save_case(case: Case, folder: Path) -> int:
    """A model, its tokenizer and prompts; the probability of the end is set by one constant number in the hidden state.

    Returns the parameters.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = random_model(
        vocab_size=VOCABULARY,
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads // 2,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        for layer in model.model.layers:  # nothing is added to it on the way
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        ids = torch.randint(2, VOCABULARY, (64, 64))
        hidden, logits = model.model(ids).last_hidden_state, model(ids).logits
        others = logits.logsumexp(-1) + torch.log1p(-logits.softmax(-1)[..., 1])
        wanted = others + torch.logit(torch.tensor(case.end or 1e-12)) - logits[..., 1]
        model.lm_head.weight[1, 0] = (wanted / hidden[..., 0]).mean()
    model.save_pretrained(folder)
    symbols = [*string.ascii_letters, *string.digits]
    tokenizer = Tokenizer(
        models.WordLevel({s: i for i, s in enumerate(["<pad>", "<eos>", *symbols])}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    rows = [{"prompt": tokenizer.decode(r.tolist())} for r in torch.randint(2, VOCABULARY, (256, PROMPT))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(p.numel() for p in model.parameters())


def link_gemma(case: Gemma, folder: Path) -> int:
    """The model, and the few-shot prompts of the six tasks of gemma3_270m_cpu.yaml. Returns the parameters."""
    from safetensors import safe_open

    from rlsys.tasks.basics import rows

    if not (case.folder / "config.json").is_file():
        raise SystemExit(f"{case.folder} is missing. `make real` installs the model there, and can then be stopped.")
    folder.mkdir()
    for file in case.folder.iterdir():
        (folder / file.name).symlink_to(file)
    prompts = ({"prompt": row["prompt"]} for row in rows("basics"))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    with safe_open(case.folder / "model.safetensors", framework="pt") as weights:
        names = weights.keys()
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
