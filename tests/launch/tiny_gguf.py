"""A GGUF file of a Gemma 3 model with one layer, written by hand."""

import gguf
import numpy as np

HIDDEN, HEAD, WIDE, VOCABULARY = 32, 16, 64, 300
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
TOKENS = [*SPECIAL, *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz()=,1"]
TOKENS += [f"<unused{i}>" for i in range(VOCABULARY - len(TOKENS))]
TYPES = [3] * 4 + [6] * 256 + [1] * (VOCABULARY - 260)  # control, byte, normal


def make_tensors():
    """The tensors of a Gemma 3 model with one layer, by their names in the file."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.post_attention_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.post_ffw_norm.weight": (HIDDEN,),
        "blk.0.attn_q_norm.weight": (HEAD,),
        "blk.0.attn_k_norm.weight": (HEAD,),
        "blk.0.attn_q.weight": (2 * HEAD, HIDDEN),
        "blk.0.attn_k.weight": (HEAD, HIDDEN),
        "blk.0.attn_v.weight": (HEAD, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, 2 * HEAD),
        "blk.0.ffn_gate.weight": (WIDE, HIDDEN),
        "blk.0.ffn_up.weight": (WIDE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, WIDE),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, tensors, *, architecture="gemma3", add_bos=True, chat_template="", parts=1):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(32)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types(TYPES)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(add_bos)
    if chat_template:
        writer.add_chat_template(chat_template)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
