"""A model that is merged tensor by tensor is the one that is merged whole, name by name and bit by bit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.errors import ConfigError
from rlsys.tasks.zigzag import make_tokenizer
from workers.learner.files import merged_model, model_shards
from workers.learner.files.adapter_files import base_fingerprint
from workers.learner.files.merged_model import write_merged_model

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from families import build_family
from loading import ROOT, save_model

pytestmark = pytest.mark.long

RANK, ALPHA = 4, 6
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True},
    "qwen3_moe": {},  # experts are stored one by one, and kept in one tensor
    "deepseek_v3": {},  # has a buffer in its files
}
FORMATS = [  # of the files, the policy and the engines
    (torch.float32, "float32", "float32"),
    (torch.bfloat16, "float32", "bfloat16"),
    (torch.float32, "bfloat16", "bfloat16"),
]
Save = Callable[..., tuple[Path, Path]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """`save("llama", torch.bfloat16)` writes a model and a random adapter, and returns their directories."""

    def save(family: str, stored: torch.dtype = torch.float32) -> tuple[Path, Path]:
        base = tmp_path / "base"
        build_family(family, **KINDS[family]).to(stored).save_pretrained(base, max_shard_size="20KB")
        make_tokenizer().save_pretrained(base)
        return base, save_adapter(base, tmp_path / "adapter")

    return save


def save_adapter(base: Path, folder: Path) -> Path:
    lm = AutoModelForCausalLM.from_pretrained(base)
    targets = ["o_proj", "kv_b_proj"] if "deepseek" in lm.config.model_type else ["q_proj", "o_proj"]
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False)
    get_peft_model(lm, settings).save_pretrained(folder)
    return folder


def merge_whole(base: Path, adapter: Path, dtype: str, format: str, target: Path) -> dict[str, Tensor]:
    """What transformers stores of a model whose layers got W + s B A, rounded as engines round."""
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name in sorted(n for n in matrices if n.endswith("lora_A.weight")):
        a, b = (matrices[n].to(lm.dtype).float() for n in (name, name.replace("lora_A", "lora_B")))
        weight = lm.get_parameter(name.removeprefix("base_model.model.").replace("lora_A.", "")).data
        weight.copy_((b @ a * (ALPHA / RANK) + weight.float()).to(getattr(torch, format)))
    lm.save_pretrained(target)
    return tensors_in(target)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert sum(map(len, files)) == len({name for tensors in files for name in tensors})
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def require_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_the_merged_model_is_that_merged_whole(family: str, formats: Any, save: Save, tmp_path: Path) -> None:
    stored, dtype, format = formats
    base, adapter = save(family, stored)
    write_merged_model(adapter, str(base), tmp_path / "merged", dtype, format)
    merged = tensors_in(tmp_path / "merged")
    require_equal(merged, merge_whole(base, adapter, dtype, format, tmp_path / "whole"))
    assert AutoConfig.from_pretrained(tmp_path / "merged").dtype == getattr(torch, dtype)
    changed = [name for name, t in tensors_in(base).items() if not torch.equal(t.to(merged[name].dtype), merged[name])]
    assert len(changed) == 4, "two layers with two adapters each"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_the_merged_model_is_the_one_that_peft_merges(family: str, save: Save, tmp_path: Path) -> None:
    base, adapter = save(family)
    write_merged_model(adapter, str(base), tmp_path / "merged", "float32", "float32")
    lm: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    expected = lm.merge_and_unload().state_dict()
    require_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict(), expected)


def test_a_base_in_pickled_files_is_merged_too(save: Save, tmp_path: Path) -> None:
    base, adapter = save("qwen3")
    expected = merge_whole(base, adapter, "float32", "bfloat16", tmp_path / "whole")
    torch.save(tensors_in(base), base / "pytorch_model.bin")
    for file in base.glob("*.safetensors*"):
        file.unlink()
    write_merged_model(adapter, str(base), tmp_path / "merged", "float32", "bfloat16")
    require_equal(tensors_in(tmp_path / "merged"), expected)


@pytest.mark.parametrize("family", KINDS)
def test_only_the_base_of_the_adapter_is_merged(family: str, save: Save, tmp_path: Path) -> None:
    base, adapter = save(family)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    origin = {"path": str(base), "fingerprint": base_fingerprint(whole)}
    (adapter / "base_model.json").write_text(json.dumps(origin))
    write_merged_model(adapter, str(base), tmp_path / "merged", "float32", "float32")
    with torch.no_grad():
        whole.get_decoder().norm.weight[3] += 0.5
    whole.save_pretrained(base)
    with pytest.raises(ConfigError, match="is an adapter of another base"):
        write_merged_model(adapter, str(base), tmp_path / "other", "float32", "float32")
    assert not (tmp_path / "other").exists()


def test_files_are_no_larger_than_the_limit(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = save("qwen3_moe")
    expected = merge_whole(base, adapter, "float32", "float32", tmp_path / "whole")
    monkeypatch.setattr(model_shards, "MAX_FILE", 30_000)
    merged = tmp_path / "merged"
    write_merged_model(adapter, str(base), merged, "float32", "float32")
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in merged.glob("*.safetensors")}
    assert len(files) > 2
    assert max(sum(t.nbytes for t in tensors.values()) for tensors in files.values()) <= 30_000
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    require_equal(tensors_in(merged), expected)


def test_what_a_full_disk_cuts_off_is_no_model(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = save("llama")

    def full(file: Path, *_: Any) -> str:
        file.write_bytes(b"the beginning")
        raise OSError("No space left on device")

    monkeypatch.setattr(merged_model, "stream_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        write_merged_model(adapter, str(base), tmp_path / "merged", "float32", "float32")
    assert [file.name for file in (tmp_path / "merged").iterdir()] == ["model.safetensors"]


MEASURE = """
import sys
from pathlib import Path
from transformers import LlamaForCausalLM
from workers.learner.files.merged_model import write_merged_model
from loading import status
adapter, base, target = sys.argv[1:]
before = status("VmRSS")
write_merged_model(Path(adapter), base, Path(target), "float32", "bfloat16")
print(status("VmHWM") - before)
"""


def test_merging_takes_the_host_memory_of_a_few_tensors(tmp_path: Path) -> None:
    save_model(tmp_path / "base", layers=64, hidden=256)
    save_adapter(tmp_path / "base", tmp_path / "adapter")
    arguments = [str(tmp_path / name) for name in ("adapter", "base", "merged")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/bench", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    tensors = tensors_in(tmp_path / "merged").values()
    model, largest = (f(t.nbytes for t in tensors) for f in (sum, max))
    peak = int(done.stdout.splitlines()[-1])
    assert model > 4.5 * largest
    assert peak < 2.5 * largest, f"{peak:,} bytes"
