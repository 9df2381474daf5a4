"""`rlsys import`: a GGUF file, written here by hand, becomes a directory that trains; or is refused with a way out."""

import json
import shutil

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tiny_gguf import TOKENS, VOCABULARY, make_tensors, write_gguf

from launch.tools.cli import commands
from launch.tools.imports import gguf_file, trained_directory
from rlsys.errors import ConfigError


def run(*arguments):
    result = CliRunner().invoke(commands, ["import", *map(str, arguments)])
    return result.output, result.exception


def refused(*arguments):
    """The sentence with which the command refuses."""
    _, error = run(*arguments)
    assert isinstance(error, ConfigError), error
    return str(error)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("import")
    path = write_gguf(folder / "tiny.gguf", make_tensors(), chat_template="{{ bos_token }}{{ messages[0]['content'] }}")
    (folder / "TERMS.html").write_text("terms")
    output, error = run(f"gguf:{path}", folder / "model", "--license", folder / "TERMS.html")
    assert error is None, output
    return folder, output


def q8_0(values):
    """Blocks of 32 values: each a whole number from -127 to 127 times a float16 scale."""
    blocks = values.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    whole = np.round(blocks / scale)
    return (whole * scale.astype(np.float16).astype(np.float32)).reshape(values.shape)


def test_weights_are_those_of_the_file(imported):
    folder, output = imported
    saved, tensors = load_file(folder / "model" / "model.safetensors"), make_tensors()
    np.testing.assert_array_equal(saved["model.embed_tokens.weight"], q8_0(tensors["token_embd.weight"]))
    np.testing.assert_array_equal(saved["model.layers.0.mlp.down_proj.weight"], q8_0(tensors["blk.0.ffn_down.weight"]))
    np.testing.assert_array_equal(saved["model.layers.0.self_attn.q_proj.weight"], q8_0(tensors["blk.0.attn_q.weight"]))
    norm = tensors["blk.0.ffn_norm.weight"] - 1  # the file holds what the model multiplies by
    np.testing.assert_array_equal(saved["model.layers.0.pre_feedforward_layernorm.weight"], norm)
    count = sum(t.size for t in tensors.values())
    assert f"{count:,} parameters, float32, all finite" in output
    assert "weights compared with the file's: 8 equal, 7 less 1" in output


def test_the_directory_loads_and_its_tokenizer_begins_texts_with_bos(imported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, output = imported
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    a, b = TOKENS.index("a"), TOKENS.index("b")
    assert tokenizer("ab")["input_ids"] == [2, a, b]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<bos>ab"
    assert "quantization_config" not in json.loads((folder / "model" / "config.json").read_text())
    logits = AutoModelForCausalLM.from_pretrained(folder / "model")(**tokenizer("ab", return_tensors="pt")).logits
    assert logits.shape == (1, 3, VOCABULARY)
    assert "texts begin with <bos>" in output
    assert "chat template: yes" in output


def test_license_and_origin_are_beside_the_model(imported):
    folder, output = imported
    card = (folder / "model" / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "tiny.gguf" in card
    assert (folder / "model" / "TERMS.html").read_text() == "terms"
    assert "license: apache-2.0" in output
    assert sorted(p.name for p in folder.iterdir()) == ["TERMS.html", "model", "tiny.gguf"]


def test_a_file_that_asks_for_no_bos_gets_none(tmp_path):
    output, error = run(
        f"gguf:{write_gguf(tmp_path / 'a.gguf', make_tensors(), tokenizer={'add_bos_token': False})}",
        tmp_path / "model",
    )
    assert error is None
    assert "texts begin with no BOS token" in output
    assert "chat template: none" in output


def without(name):
    return {n: t for n, t in make_tensors().items() if n != name}


def with_nan():
    tensors = make_tensors()
    tensors["output_norm.weight"][3] = np.nan
    return tensors


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (without("blk.0.ffn_up.weight"), {}, "lacks 1 tensors of a gemma3 model, such as blk.0.ffn_up.weight"),
        (make_tensors() | {"rope_freqs.weight": np.ones(8, np.float32)}, {}, "rope_freqs.weight"),
        (with_nan(), {}, "NaN"),
        (
            make_tensors(),
            {"architecture": "wavtokenizer-dec"},
            "llama, qwen2, qwen3, gemma2, gemma3, not of wavtokenizer-dec. Use",
        ),
        (make_tensors(), {"parts": 3}, "one of 3 parts. Join them first: llama-gguf-split --merge"),
    ],
    ids=["a tensor is missing", "a tensor has no place", "NaN", "architecture", "one part"],
)
def test_a_file_that_would_not_become_the_same_model_is_refused(tmp_path, tensors, settings, message):
    path = write_gguf(tmp_path / "a.gguf", tensors, **settings)
    assert message in refused(f"gguf:{path}", tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"], "nothing half-written stays"


@pytest.mark.parametrize("share", [0.0005, 0.02, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_refused(tmp_path, share):
    path = write_gguf(tmp_path / "a.gguf", make_tensors())
    path.write_bytes(path.read_bytes()[: round(share * path.stat().st_size)])
    assert "is damaged or cut off: " in refused(f"gguf:{path}", tmp_path / "model")


def test_what_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 zipped")
    assert "is not a GGUF file: it begins with b'PK" in refused(f"gguf:{tmp_path / 'a.gguf'}", tmp_path / "model")
    assert "does not exist" in refused(f"gguf:{tmp_path / 'gone.gguf'}", tmp_path / "model")
    assert "neither gguf:PATH" in refused("Qwen/Qwen2.5-0.5B", tmp_path / "model")


def test_a_directory_in_use_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    assert "exists and is not empty" in refused("gguf:a.gguf", tmp_path / "model")
    assert (tmp_path / "model" / "mine").read_text() == "mine"


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", make_tensors())
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(trained_directory.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(gguf_file, "write_model", None)
    assert "GB free, and the model needs" in refused(f"gguf:{path}", tmp_path / "model")


def test_a_hub_that_cannot_be_reached_is_told_with_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", "http://127.0.0.1:9", raising=False)
    sentence = refused("hf:Qwen/Qwen2.5-0.5B", tmp_path / "model")
    assert sentence.startswith("Qwen/Qwen2.5-0.5B cannot be downloaded: ")
    assert "copy the directory here, and name it in model.path" in sentence
    assert not list(tmp_path.iterdir())


def test_weights_that_differ_from_the_file_are_found(imported, tmp_path):
    folder, _ = imported
    copy = shutil.copytree(folder / "model", tmp_path / "model")
    saved = load_file(copy / "model.safetensors")
    saved["model.layers.0.mlp.up_proj.weight"][5, 7] += 1e-3
    save_file(saved, copy / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"up_proj\.weight of the model differs from blk\.0\.ffn_up\.weight of the file, where it should be equal",
    ):
        gguf_file.compare_weights(gguf.GGUFReader(folder / "tiny.gguf"), copy)
