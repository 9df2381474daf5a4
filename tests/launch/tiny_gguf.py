"""GGUF files of tiny models, written by hand, and what transformers computes with their weights."""

import gguf
import numpy as np

HIDDEN, HEADS, HEAD, WIDE, VOCABULARY = 32, 2, 16, 64, 300
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
TOKENS = [*SPECIAL, *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz()=,1"]
TOKENS += [f"<unused{i}>" for i in range(VOCABULARY - len(TOKENS))]
TYPES = [3] * 4 + [6] * 256 + [1] * (VOCABULARY - 260)  # control, byte, normal
SENTENCEPIECE = {
    "model": "llama",
    "tokens": TOKENS,
    "scores": [-float(i) for i in range(VOCABULARY)],
    "token_type": TYPES,
    "padding_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "unknown_token_id": 3,
    "add_bos_token": True,
}
LAYER = {  # the file's name: transformers' name
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
SANDWICH = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
HEAD_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
LAYERS = {
    "llama": LAYER,
    "qwen2": LAYER | BIASES,
    "qwen3": LAYER | HEAD_NORMS,
    "gemma2": LAYER | SANDWICH,
    "gemma3": LAYER | SANDWICH | HEAD_NORMS,
}


def make_tensors(architecture="gemma3", layers=1, *, untied=False, head=HEAD):
    """Random tensors by their names in the file. Norms are near one."""
    rng = np.random.default_rng(0)
    rows = {"attn_q": HEADS * head, "attn_k": head, "attn_v": head, "attn_output": HIDDEN, "ffn_down": HIDDEN}
    columns = {"attn_output": HEADS * head, "ffn_down": WIDE}
    shapes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if untied:
        shapes["output.weight"] = (VOCABULARY, HIDDEN)
    for i in range(layers):
        for name in LAYERS[architecture]:
            kind = name.partition(".")[0]
            shape = (rows.get(kind, WIDE), columns.get(kind, HIDDEN))
            if kind.endswith("norm"):
                shape = (head,) if kind in ("attn_q_norm", "attn_k_norm") else (HIDDEN,)
            elif name.endswith(".bias"):
                shape = shape[:1]
            shapes[f"blk.{i}.{name}"] = shape
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {n: 1 + t / 4 if n.endswith("norm.weight") else t for n, t in tensors.items()}


def make_keys(architecture, tensors):
    """The keys of the architecture, without its name."""
    keys = {
        "context_length": 64,
        "embedding_length": HIDDEN,
        "block_count": sum(name.endswith("attn_q.weight") for name in tensors),
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": tensors.get("blk.0.attn_k.weight", np.zeros(HEAD)).shape[0],
        "rope.freq_base": 1e6 if architecture == "gemma3" else 5e4,
    }
    keys["attention.value_length"] = keys["attention.key_length"]
    return keys | ({"attention.sliding_window": 32} if architecture in ("gemma2", "gemma3") else {})


def write_gguf(
    path,
    tensors,
    *,
    architecture="gemma3",
    keys=None,
    tokenizer=None,
    others=None,
    chat_template="",
    parts=1,
    kind=gguf.GGMLQuantizationType.Q8_0,
):
    """`keys` and `tokenizer` add to the usual ones; a value of None leaves one out. Matrices are of the given kind."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    if chat_template:
        writer.add_chat_template(chat_template)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    add_all(writer, f"{architecture}.", make_keys(architecture, tensors) | (keys or {}))
    add_all(writer, "tokenizer.ggml.", SENTENCEPIECE | (tokenizer or {}))
    add_all(writer, "", others or {})
    for name, values in tensors.items():
        form = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_all(writer, prefix, values):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(prefix + name, value)
        elif value is not None:
            kinds[type(value)](prefix + name, value)


def transformers_model(architecture, tensors, **settings):
    """The model of transformers with these weights, and a config.json that says the least."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = make_keys(architecture, tensors)
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": keys["attention.key_length"],
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    kind = "gemma3_text" if architecture == "gemma3" else architecture
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **usual | settings), attn_implementation="eager"
    )
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {"output.weight": "lm_head.weight"} if "output.weight" in tensors else {}
    for i in range(keys["block_count"]):
        names |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in LAYERS[architecture].items()}
    weights = {}
    for name, theirs in names.items():
        values = tensors[name]
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values - 1  # what the file holds is what the model multiplies by
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            values = to_halves(values, keys["attention.key_length"])
        weights[theirs] = torch.tensor(values)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name == "lm_head.weight" or "rotary" in name for name in missing), missing
    return model.eval()


def to_halves(rows, head):
    """llama.cpp rotates neighboring rows of a head, transformers rows that are half a head apart."""
    order = [*range(0, head, 2), *range(1, head, 2)]
    return np.concatenate([part[order] for part in np.split(rows, len(rows) // head)])
