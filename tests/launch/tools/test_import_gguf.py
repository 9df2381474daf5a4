"""`rlsys import gguf:` gives what the file computes, or refuses by name what it cannot carry over."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_gguf import HEAD, SENTENCEPIECE, VOCABULARY, make_tensors, transformers_model, write_gguf

from launch.tools.imports.command import import_model
from launch.tools.imports.gguf_checks import check_tokens, compare_logprobs, compare_weights
from rlsys.errors import ConfigError

F32 = gguf.GGMLQuantizationType.F32


class Silent:
    def print(self, *_, **__):
        pass


def do_import(path, target):
    import_model(f"gguf:{path}", target, (), Silent())
    return target


def refused(path, target):
    with pytest.raises(ConfigError) as error:
        do_import(path, target)
    assert not target.exists()
    return str(error.value)


def divisors(factor, theta=5e4):
    """What Llama 3.1 divides each frequency by: 1 for short waves, the factor for long ones."""
    waves = 2 * np.pi * theta ** (np.arange(0, HEAD, 2) / HEAD)
    share = np.clip((8192 / waves - 1) / 3, 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def rope(kind="default", theta=5e4, **settings):
    return {"rope_type": kind, "rope_theta": theta, **settings}


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
YARN_ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=32)
GLOBAL_LINEAR = {
    "full_attention": rope("linear", 1e6, factor=8.0),
    "sliding_attention": rope(theta=1e4),
}
GLOBAL = {"full_attention": rope(theta=1e6), "sliding_attention": rope(theta=1e4)}
GEMMA3 = {"sliding_window": 8, "query_pre_attn_scalar": HEAD, "rope_parameters": GLOBAL}
GEMMA2 = {"sliding_window": 8, "query_pre_attn_scalar": HEAD}
WINDOW = {"attention.sliding_window": 8}


def usual(architecture):
    """transformers reads the tokenizer of each model of qwen2 as Qwen's."""
    return byte_level("qwen2") if architecture == "qwen2" else {}


@pytest.mark.parametrize(
    ("architecture", "form", "more", "keys", "settings"),
    [
        ("llama", {"layers": 3}, {}, {}, {}),
        ("llama", {"layers": 2, "untied": True, "head": 24}, {}, {}, {}),
        ("llama", {"layers": 2}, {}, {"rope.scaling.factor": 4.0}, {"rope_parameters": rope("linear", factor=4.0)}),
        ("llama", {"layers": 2}, {}, YARN, {"rope_parameters": YARN_ROPE}),
        (
            *("llama", {"layers": 2}, {"rope_freqs.weight": divisors(32.0)}, {"context_length": 9000}),
            {
                "rope_parameters": rope(
                    "llama3",
                    factor=32.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=8192,
                )
            },
        ),
        ("qwen2", {"layers": 2}, {}, {}, {}),
        ("qwen2", {"layers": 2, "untied": True}, {}, YARN, {"rope_parameters": YARN_ROPE}),
        ("qwen3", {"layers": 2, "head": 24}, {}, {"attention.layer_norm_rms_epsilon": 0.1}, {"rms_norm_eps": 0.1}),
        ("gemma2", {"layers": 3}, {}, WINDOW, GEMMA2),
        (
            *("gemma2", {"layers": 2}, {}),
            WINDOW | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
            GEMMA2 | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        ),
        ("gemma2", {"layers": 46, "head": 24}, {}, WINDOW, GEMMA2),  # 27 billion: the share of a head, not its size
        ("gemma3", {"layers": 7}, {}, WINDOW, GEMMA3),
        ("gemma3", {"layers": 7, "untied": True}, {}, WINDOW, GEMMA3),
        ("gemma3", {"layers": 62, "head": 24}, {}, WINDOW, GEMMA3),
        (
            *("gemma3", {"layers": 6}, {}, WINDOW | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
            GEMMA3 | {"rope_parameters": GLOBAL_LINEAR},
        ),
        (
            *("gemma3", {"layers": 3}, {}, WINDOW | {"attention.sliding_window_pattern": [False, True, False]}),
            GEMMA3 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        ),
        (
            *("gemma3", {"layers": 2}, {}, WINDOW | {"rope.freq_base_swa": 500.0}),
            GEMMA3 | {"rope_parameters": GLOBAL | {"sliding_attention": rope(theta=500.0)}},
        ),
    ],
)
def test_an_imported_model_computes_what_the_authors_model_does(tmp_path, architecture, form, more, keys, settings):
    tensors = make_tensors(architecture, **form)
    path = tmp_path / "a.gguf"
    write_gguf(path, tensors | more, architecture=architecture, keys=keys, kind=F32, tokenizer=usual(architecture))
    from transformers import AutoModelForCausalLM

    imported = AutoModelForCausalLM.from_pretrained(do_import(path, tmp_path / "model"), attn_implementation="eager")
    wanted = transformers_model(architecture, tensors, **settings)
    ids = torch.randint(VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(48)[None]
    if more:
        positions[:, 24:] += 8000  # Llama 3.1 changes slow rotations alone
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        gap = imported(**inputs).logits.log_softmax(-1) - wanted(**inputs).logits.log_softmax(-1)
    assert gap.abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_0"])
def test_quantized_matrices_are_read(tmp_path, kind):
    path = write_gguf(
        tmp_path / "a.gguf", make_tensors("llama"), architecture="llama", kind=gguf.GGMLQuantizationType[kind]
    )
    do_import(path, tmp_path / "model")


@pytest.mark.parametrize(
    ("architecture", "keys", "named"),
    [
        ("gemma3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "gemma3.rope.scaling.type = yarn"),
        ("gemma3", {"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, "gemma3.rope.scaling.factor = 8.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping = 50.0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping = 30.0"),
        ("gemma3", {"attention.scale": 0.1}, "gemma3.attention.scale = 0.1"),
        ("gemma3", {"query_pre_attn_scalar": 168}, "gemma3.query_pre_attn_scalar = 168"),
        ("gemma3", {"rope.dimension_count": 8}, "gemma3.rope.dimension_count is 8, not 16"),
        ("gemma3", {"attention.value_length": 8}, "gemma3.attention.value_length is 8, not 16"),
        ("gemma3", {"attention.key_length_swa": 8}, "gemma3.attention.key_length_swa = 8"),
        ("gemma3", {"attention.sliding_window": None}, "lacks attention.sliding_window"),
        ("gemma3", {"attention.causal": False}, "gemma3.attention.causal = False"),
        ("gemma3", {"attention.layer_norm_rms_epsilon": None}, "lacks attention.layer_norm_rms_epsilon"),
        ("gemma3", {"attention.sliding_window_pattern": [True, False]}, "is for 2 layers, and the file has 1"),
        ("gemma2", {"rope.freq_base_swa": 7.0}, "gemma2.rope.freq_base_swa = 7.0"),
        ("gemma2", {"query_pre_attn_scalar": 144}, "gemma2.query_pre_attn_scalar = 144"),
        ("llama", {"attention.sliding_window": 8}, "llama.attention.sliding_window = 8"),
        ("llama", {"expert_count": 4, "expert_used_count": 2}, "llama.expert_count = 4, llama.expert_used_count = 2"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ("llama", {"residual_scale": 0.5}, "llama.residual_scale = 0.5"),
        ("llama", {"rope.scale_linear": 2.0}, "llama.rope.scale_linear = 2.0"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope.scaling.type = longrope"),
        ("llama", YARN | {"rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor = 2.0"),
        ("llama", {"attention.head_count": [2, 4]}, "attention.head_count differs between layers: [2, 4]"),
        ("llama", {"vocab_size": 301}, "llama.vocab_size is 301, not 300"),
        ("llama", {"rope.dimension_count": 8}, "llama.rope.dimension_count is 8, not 16"),
        ("qwen2", {"attention.sliding_window": 8}, "qwen2.attention.sliding_window = 8"),
        ("qwen3", {"rope.scaling.yarn_beta_fast": 16.0}, "qwen3.rope.scaling.yarn_beta_fast = 16.0"),
        ("qwen3", {"pooling_type": 3}, "qwen3.pooling_type = 3"),
    ],
)
def test_a_setting_that_the_model_would_not_get_is_refused_by_name(tmp_path, architecture, keys, named):
    path = write_gguf(tmp_path / "a.gguf", make_tensors(architecture), architecture=architecture, keys=keys)
    sentence = refused(path, tmp_path / "model")
    assert named in sentence
    assert sentence.endswith("model.path.") or "lacks" in sentence or "the file has 1" in sentence


def test_settings_without_effect_are_let_through(tmp_path):
    keys = {"expert_count": 0, "attention.causal": True, "rope.dimension_count": HEAD, "vocab_size": VOCABULARY}
    others = {"general.tags": ["a"], "quantize.imatrix.file": "b", "tokenizer.ggml.add_sep_token": False}
    path = write_gguf(tmp_path / "a.gguf", make_tensors("llama"), architecture="llama", keys=keys, others=others)
    do_import(path, tmp_path / "model")


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"clip.vision.block_count": 2}, "clip.vision.block_count = 2"),
        ({"tokenizer.ggml.add_sep_token": True}, "tokenizer.ggml.add_sep_token = True"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap = [1, 2]"),
        ({"general.type": "adapter"}, "a adapter, not a model"),
    ],
)
def test_what_the_file_says_elsewhere_is_refused_by_name(tmp_path, others, named):
    assert named in refused(write_gguf(tmp_path / "a.gguf", make_tensors(), others=others), tmp_path / "model")


@pytest.mark.parametrize("architecture", ["phi3", "qwen3moe", "gemma", "command-r"])
def test_other_architectures_are_refused_with_those_that_can_be_imported(tmp_path, architecture):
    sentence = refused(write_gguf(tmp_path / "a.gguf", make_tensors(), architecture=architecture), tmp_path / "model")
    assert f"of llama, qwen2, qwen3, gemma2, gemma3, not of {architecture}. Use the original checkpoint" in sentence


def changed(architecture, name, values):
    """The usual tensors, with one replaced, or taken away."""
    tensors = make_tensors(architecture) | {name: values}
    return {n: t for n, t in tensors.items() if t is not None}


@pytest.mark.parametrize(
    ("architecture", "name", "values", "named"),
    [
        ("llama", "blk.0.attn_k.weight", None, "lacks 1 tensors of a llama model, such as blk.0.attn_k.weight"),
        ("llama", "blk.0.attn_q.bias", np.ones(32, np.float32), "not of a llama model, such as blk.0.attn_q.bias"),
        ("llama", "blk.1.attn_q.weight", np.ones((32, 32), np.float32), "lacks 8 tensors of a llama model"),
        ("llama", "blk.0.ffn_gate_inp.weight", np.ones((4, 32), np.float32), "such as blk.0.ffn_gate_inp.weight"),
        ("llama", "rope_freqs.weight", 1 + np.arange(8, dtype=np.float32), "rope_freqs.weight is not the scaling"),
        ("qwen2", "blk.0.attn_v.bias", None, "such as blk.0.attn_v.bias"),
        ("qwen2", "rope_freqs.weight", divisors(8.0), "such as rope_freqs.weight"),
        ("qwen3", "blk.0.attn_q_norm.weight", None, "such as blk.0.attn_q_norm.weight"),
        ("gemma2", "output.weight", np.ones((300, 32), np.float32), "such as output.weight"),
        ("gemma2", "blk.0.attn_q_norm.weight", np.ones(16, np.float32), "such as blk.0.attn_q_norm.weight"),
        ("gemma3", "token_embd.weight", None, "lacks 1 tensors of a gemma3 model, such as token_embd.weight"),
        ("gemma3", "blk.0.ffn_up.weight", np.ones((32, 32), np.float32), "blk.0.ffn_up.weight has the shape (32, 32)"),
        ("gemma3", "token_embd.weight", np.ones((299, 32), np.float32), "300 tokens, and token_embd.weight 299 rows"),
    ],
)
def test_missing_and_further_tensors_are_refused_by_name(tmp_path, architecture, name, values, named):
    path = write_gguf(tmp_path / "a.gguf", changed(architecture, name, values), architecture=architecture)
    assert named in refused(path, tmp_path / "model")


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def imported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tensors = make_tensors(request.param, layers=6, untied=True)
    keys = {"attention.sliding_window": 8} if request.param == "gemma3" else {}
    path = folder / "a.gguf"
    write_gguf(path, tensors, architecture=request.param, keys=keys, tokenizer=usual(request.param))
    return request.param, gguf.GGUFReader(path), do_import(path, folder / "model")


def test_each_tensor_has_one_relation_to_the_file(imported, tmp_path):
    _, reader, folder = imported
    saved = load_file(folder / "model.safetensors")
    for name, values in saved.items():
        for change in (lambda t: t[::-1], lambda t: t + 1, lambda t: t - 1):
            save_file(saved | {name: np.ascontiguousarray(change(values))}, tmp_path / "model.safetensors")
            with pytest.raises(ConfigError, match=rf"^{name} of the model differs from "):
                compare_weights(reader, tmp_path)


def test_a_model_with_another_configuration_computes_other_logprobs(imported, tmp_path):
    architecture, reader, folder = imported
    copy = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((copy / "config.json").read_text())
    rope_parameters = settings["rope_parameters"]
    changes = [{"rms_norm_eps": 1e-2}]
    if architecture == "gemma3":
        changes += [{"query_pre_attn_scalar": 12}, {"sliding_window": 9}, {"final_logit_softcapping": 30.0}]
        changes += [{"layer_types": ["full_attention"] * 6}]
        for name, theta in (("full_attention", 5e5), ("sliding_attention", 2e4)):
            changes.append({"rope_parameters": rope_parameters | {name: rope(theta=theta)}})
    else:
        changes += [{"rope_parameters": rope(theta=1e5)}, {"rope_parameters": rope("linear", factor=1.5)}]
        changes += [{"hidden_act": "gelu"}]
    for change in changes:
        (copy / "config.json").write_text(json.dumps(settings | change))
        with pytest.raises(ConfigError, match="computes other log-probs than the file"):
            compare_logprobs(reader, copy)


def byte_tokens():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [
        "<|start|>",
        "<|end|>",
        "<think>",
        *bytes_to_unicode().values(),
        "12",
        "123",
        "he",
        "hex",
        "Ġhe",
        "n'",
        "n'S",
    ]
    return tokens + [f"<unused{i}>" for i in range(VOCABULARY - len(tokens))]


def byte_level(pre, **settings):
    tokens = byte_tokens()
    usual = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "scores": None,
        "token_type": [3, 3, 4, *[1] * 263, *[5] * (VOCABULARY - 266)],  # control, user-defined, normal, unused
        "merges": ["1 2", "h e", "Ġ he", "12 3", "n '", "n' S"],  # none leads to "hex"
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": None,
        "unknown_token_id": None,
        "add_bos_token": None,
    }
    return usual | settings


@pytest.mark.parametrize(
    ("tokenizer", "text", "tokens"),
    [
        (byte_level("smollm"), "a123 he", ["a", "1", "2", "3", "Ġhe"]),
        (byte_level("starcoder"), "a123 he", ["a", "1", "2", "3", "Ġhe"]),
        (byte_level("deepseek-coder"), "a123 he", ["a", "1", "2", "3", "Ġhe"]),
        (byte_level("gpt-2"), "a123 hex", ["a", "123", "Ġhe", "x"]),
        (byte_level("qwen2"), "a123 hex hex", ["a", "1", "2", "3", "Ġhe", "x", "Ġhe", "x"]),
        (byte_level("gpt-2"), "n'S", ["n", "'", "S"]),
        (byte_level("llama-bpe"), "1234hex", ["<|start|>", "123", "4", "hex"]),
        (byte_level("smaug-bpe"), "1234hex", ["123", "4", "he", "x"]),
        (byte_level("llama-bpe", add_bos_token=False), "12", ["12"]),
        (byte_level("qwen2", add_bos_token=True, add_eos_token=True), "he", ["<|start|>", "he", "<|end|>"]),
        (byte_level("qwen2"), "he<think><|end|>he", ["he", "<think>", "<|end|>", "he"]),
    ],
)
def test_texts_are_cut_as_the_file_says(tmp_path, tokenizer, text, tokens):
    path = write_gguf(tmp_path / "a.gguf", make_tensors("llama"), architecture="llama", tokenizer=tokenizer)
    assert read_tokens(do_import(path, tmp_path / "model"), text) == tokens


def read_tokens(folder, text):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize("pre", [None, "default", "deepseek-llm", "tekken", "gpt-4o", "made-up"])
def test_an_unknown_way_of_cutting_is_refused_by_name(tmp_path, pre):
    path = write_gguf(tmp_path / "a.gguf", make_tensors("llama"), architecture="llama", tokenizer=byte_level(pre))
    assert f"tokenizer.ggml.pre is {pre or 'missing'}" in refused(path, tmp_path / "model")


PAIRS = [*SENTENCEPIECE["tokens"][:292], "ab", "bc", "abc", "▁a", "  ", "<turn>", "▁abc", "▁b"]
KINDS = [*SENTENCEPIECE["token_type"][:296], 4, 3, 1, 1]


def pairs(**settings):
    """ "bc" is merged before "ab", and "▁a" before both."""
    scores = [-1000.0] * 292 + [-3.0, -2.0, -1.0, -1.5, 0.0, 0.0, -0.5, -4.0]
    return {"tokens": PAIRS, "scores": scores, "token_type": KINDS} | settings


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "text", "tokens"),
    [
        ("gemma3", pairs(), "abcab", ["<bos>", "abc", "ab"]),
        ("gemma3", pairs(), "b abab", ["<bos>", "b", "▁a", "b", "ab"]),
        ("llama", pairs(), "b<turn>b", ["<bos>", "▁b", "<turn>", "▁b"]),
        ("llama", pairs(add_space_prefix=False), "b<turn>b", ["<bos>", "b", "<turn>", "b"]),
        ("gemma3", pairs(add_bos_token=False, add_eos_token=True), "a  ü", ["a", "  ", "<0xC3>", "<0xBC>", "<eos>"]),
        ("gemma3", pairs(add_bos_token=None), "c", ["<bos>", "c"]),
    ],
)
def test_sentencepiece_merges_by_the_scores_of_the_file(tmp_path, architecture, tokenizer, text, tokens):
    path = write_gguf(tmp_path / "a.gguf", make_tensors(architecture), architecture=architecture, tokenizer=tokenizer)
    assert read_tokens(do_import(path, tmp_path / "model"), text) == tokens


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tokens": [*PAIRS[:-1], "ab"]}, "tokenizer.ggml.tokens has 'ab' more than once"),
        ({"scores": [0.0] * 5}, "tokenizer.ggml.scores has 5 entries for 300 tokens"),
        ({"bos_token_id": 300}, "tokenizer.ggml.bos_token_id is 300, and the file has 300 tokens"),
        ({"pre": "made-up"}, "tokenizer.ggml.pre = made-up"),
        ({"model": "t5"}, "tokenizer.ggml.model is t5; llama and gpt2 can be imported"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused(tmp_path, settings, named):
    path = write_gguf(tmp_path / "a.gguf", make_tensors(), tokenizer=pairs(**settings))
    assert named in refused(path, tmp_path / "model")


def test_another_tokenizer_beside_the_model_is_found(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", make_tensors("llama"), architecture="llama", tokenizer=byte_level("smollm"))
    folder = do_import(path, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    del tokenizer["pre_tokenizer"]["pretokenizers"][0]  # digits are no longer cut one by one
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="'12"):
        check_tokens(gguf.GGUFReader(path), folder)


def test_all_tokens_that_end_a_turn_are_kept(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", make_tensors(), tokenizer=pairs(eot_token_id=297))
    settings = json.loads((do_import(path, tmp_path / "model") / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 297]
