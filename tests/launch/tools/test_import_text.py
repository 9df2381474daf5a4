"""`rlsys import dir:PATH` keeps the text model of one that takes images too; it computes what the whole one computes."""

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tiny_multimodal import FAMILIES, MROPE, QWEN_VISION, TEXT, VISION, save_whole
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from launch.tools.cli import commands
from launch.tools.imports import text_model
from rlsys.errors import ConfigError
from rlsys.models.support import architecture_problem


@pytest.fixture(scope="module", params=FAMILIES)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path, str]:
    """Its family, the whole model's directory, the text model's, and what the command said."""
    text, vision, _ = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_whole(request.param, folder / "whole", text, vision)
    output, error = run(f"dir:{folder / 'whole'}", folder / "text")
    assert error is None, (output, error)
    return request.param, folder / "whole", folder / "text", output


def run(*arguments: Any) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(commands, ["import", *map(str, arguments)])
    return result.output, result.exception


def test_the_text_model_is_trainable_and_computes_what_the_whole_one_does(
    imported: tuple[str, Path, Path, str],
) -> None:
    family, whole, text, output = imported
    settings = json.loads((text / "config.json").read_text())
    assert settings["model_type"] == FAMILIES[family][2]
    assert architecture_problem(settings) == ""
    ids = torch.arange(20, 60)[None]
    one, other = AutoModelForMultimodalLM.from_pretrained(whole), AutoModelForCausalLM.from_pretrained(text)
    assert type(other).__name__.endswith("ForCausalLM")
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=ids).logits, one(input_ids=ids).logits, rtol=0, atol=1e-5)
    assert f"the text model of a {family} model" in output
    assert json.loads((text / "generation_config.json").read_text()) == {"eos_token_id": [1, 5]}
    if family in ("qwen3_vl", "qwen2_5_vl"):
        assert settings["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}, "vLLM asks for images else"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """Has the hub's client copy from a directory. Returns the list of files that it has copied."""

    def serve(source: Path) -> list[str]:
        copied: list[str] = []

        def download(
            name: str,
            local_dir: Path,
            allow_patterns: list[str],
            ignore_patterns: Any = None,
            dry_run: bool = False,
            revision: str = "main",
        ) -> list[Any]:
            files = [f for f in source.iterdir() if any(fnmatch(f.name, pattern) for pattern in allow_patterns)]
            if not dry_run:
                assert revision == "c0ffee", "weights are of the commit that was listed"
                local_dir.mkdir(exist_ok=True)
                copied.extend(Path(shutil.copy(file, local_dir)).name for file in files)
            assert name == "someone/model"
            facts = {"commit_hash": "c0ffee" if revision in ("main", "v2", "c0ffee") else revision}
            return [SimpleNamespace(filename=file.name, file_size=file.stat().st_size, **facts) for file in files]

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return copied

    return serve


def test_a_model_of_the_hub_is_replaced_by_its_text_model(
    imported: tuple[str, Path, Path, str], tmp_path: Path, hub: Callable[[Path], list[str]]
) -> None:
    _, whole, text, _ = imported
    hub(whole)
    output, error = run("hf:someone/model@v2", tmp_path / "model")
    assert error is None, output
    assert json.loads((tmp_path / "model" / "origin.json").read_text()) == {
        "hub": "someone/model",
        "revision": "c0ffee",
    }
    assert "revision c0ffee" in output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]
    one, other = (load_file(folder / "model.safetensors") for folder in (text, tmp_path / "model"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("glm4v", {}, "transformers has no class for glm4v_text models alone"),
        (
            "mistral3",
            {"quantization_config": {"quant_method": "fp8"}},
            "someone/model: its weights are quantized (fp8)",
        ),
        ("mistral3", {"model_type": "phimoe", "text_config": None, "vision_config": None}, "draw experts at random"),
    ],
)
def test_a_model_of_the_hub_that_cannot_be_trained_is_refused_before_its_weights_are_downloaded(
    family: str, options: dict[str, Any], sentence: str, tmp_path: Path, hub: Callable[[Path], list[str]]
) -> None:
    save_whole(family, tmp_path / "whole", TEXT | MROPE, QWEN_VISION if family == "glm4v" else VISION)
    file = tmp_path / "whole" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    copied = hub(tmp_path / "whole")
    assert sentence in refused("hf:someone/model", tmp_path / "model")
    assert copied == ["config.json"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["whole"]


def refused(*arguments: Any) -> str:
    _, error = run(*arguments)
    assert isinstance(error, ConfigError), error
    return str(error)


def test_what_has_no_text_model_to_keep_is_refused(tmp_path: Path) -> None:
    assert "has no config.json that can be read" in refused(f"dir:{tmp_path / 'none'}", tmp_path / "out")
    AutoConfig.for_model("llama").save_pretrained(tmp_path / "llama")
    assert "is a model of text already: name it in model.path" in refused(f"dir:{tmp_path / 'llama'}", tmp_path / "out")
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path / "empty")
    assert "The model cannot be loaded" in refused(f"dir:{tmp_path / 'empty'}", tmp_path / "out")
    save_whole("glm4v", tmp_path / "glm", TEXT | MROPE, QWEN_VISION | {"depth": 1})
    assert "transformers has no class for glm4v_text models alone" in refused(
        f"dir:{tmp_path / 'glm'}", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_a_text_model_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, vision, _ = FAMILIES["mistral3"]
    save_whole("mistral3", tmp_path / "whole", text, vision)
    taken = text_model.text_model_of

    def take_with_another_norm(whole: Any) -> Any:
        model = taken(whole)
        model.model.norm.weight.data = model.model.norm.weight.data + 0.1  # not in the whole model
        return model

    monkeypatch.setattr(text_model, "text_model_of", take_with_another_norm)
    message = refused(f"dir:{tmp_path / 'whole'}", tmp_path / "out")
    assert "The text model alone computes other log-probs than within mistral3: they differ by up to 0." in message
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]


def test_a_config_with_the_texts_options_outside_is_of_more_than_text(tmp_path: Path) -> None:
    text, vision, _ = FAMILIES["qwen2_5_vl"]
    save_whole("qwen2_5_vl", tmp_path / "whole", text, vision)
    settings = json.loads((tmp_path / "whole" / "config.json").read_text())
    flat = (
        settings
        | settings.pop("text_config")
        | {"model_type": "qwen2_5_vl", "architectures": settings["architectures"]}
    )
    (tmp_path / "whole" / "config.json").write_text(json.dumps(flat))
    assert "Keep the text model: rlsys import" in architecture_problem(flat)
    output, error = run(f"dir:{tmp_path / 'whole'}", tmp_path / "text")
    assert error is None, (output, error)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "qwen2"


def test_damaged_and_quantized_models_are_refused(tmp_path: Path) -> None:
    text, vision, _ = FAMILIES["mistral3"]
    save_whole("mistral3", tmp_path / "whole", text, vision)
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if "language_model" in name and "layers.1.mlp" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
    assert "1 tensors of the model are not in the weights, such as" in refused(
        f"dir:{tmp_path / 'whole'}", tmp_path / "out"
    )
    save_file(tensors | {lost: tensors[lost] * np.nan}, file, {"format": "pt"})
    assert "computes NaN: its weights are damaged" in refused(f"dir:{tmp_path / 'whole'}", tmp_path / "out")
    file.write_bytes(file.read_bytes()[:-100])
    assert "The model cannot be loaded" in refused(f"dir:{tmp_path / 'whole'}", tmp_path / "out")
    config = tmp_path / "whole" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    assert "its weights are quantized (fp8)" in refused(f"dir:{tmp_path / 'whole'}", tmp_path / "out")
    config.write_text("[]")
    assert "config.json is not a model's: it has no model_type." in refused(
        f"dir:{tmp_path / 'whole'}", tmp_path / "out"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]


def test_what_transformers_does_not_foresee_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, vision, _ = FAMILIES["gemma3"]
    save_whole("gemma3", tmp_path / "whole", text, vision)
    monkeypatch.setattr(text_model, "decoder", lambda model: next(iter([])))
    message = refused(f"dir:{tmp_path / 'whole'}", tmp_path / "out")
    assert message.startswith("The text model of this gemma3 model cannot be taken: StopIteration: ")
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]


def test_the_chat_template_of_a_processor_comes_along(tmp_path: Path) -> None:
    text, vision, _ = FAMILIES["mistral3"]
    save_whole("mistral3", tmp_path / "whole", text, vision)
    (tmp_path / "whole" / "chat_template.json").write_text(
        json.dumps({"chat_template": "{{ messages[0]['content'] }}"})
    )
    output, error = run(f"dir:{tmp_path / 'whole'}", tmp_path / "text")
    assert error is None, (output, error)
    assert "chat template: yes" in output
