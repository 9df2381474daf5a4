"""`rlsys init`: what it writes is valid, and fits."""

import gzip
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from click.testing import CliRunner

from launch.tools.cli import commands
from launch.tools.init.command import default_name
from launch.tools.init.options import InitOptions
from launch.tools.init.render import COMMENTS
from rlsys.checks import load_checked
from rlsys.config.loading import flatten
from rlsys.config.schema import Config
from rlsys.errors import ConfigError


def run_init(*words: object) -> str:
    result = CliRunner().invoke(commands, ["init", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def plan_verdict(file: object, *words: str) -> str:
    return CliRunner().invoke(commands, ["plan", str(file), *words], catch_exceptions=False).output.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "1xL4"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "4xL40S"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "1xH100"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "4xL40S"),
        ("Qwen/Qwen3-4B", "1xH100"),
        ("Qwen/Qwen3-4B", "16xA100-80"),
        ("Qwen/Qwen2.5-7B-Instruct", "8xH100"),
        ("Qwen/Qwen2.5-7B-Instruct", "16xA100-80"),
        ("meta-llama/Llama-3.1-8B-Instruct", "8xH200"),
    ],
)
def test_a_written_configuration_is_valid_and_fits(model, gpus, tmp_path):
    count, _, kind = gpus.partition("x")
    file = tmp_path / "my.yaml"
    run_init("--model", model, "--data", "openai/gsm8k", "--gpus", count, "--gpu", kind, "-o", file)
    config = load_checked(file)
    assert config.model.path == model
    assert config.rollout.engines * config.rollout.tensor_parallel <= int(count)
    assert plan_verdict(file, "--cluster", gpus) == f"✓ {file} fits."


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-72B-Instruct"])
def test_a_large_model_is_spread(model, tmp_path):
    file = tmp_path / "my.yaml"
    run_init("--model", model, "--data", "openai/gsm8k", "--gpus", 32, "-o", file)
    assert load_checked(file).policy.zero_stage == 3
    assert "fits" in plan_verdict(file, "--cluster", "32xH100")


def test_the_built_in_task_runs_on_this_machine(tmp_path):
    file = tmp_path / "my.yaml"
    assert "rlsys train" in run_init("--model", "builtin:tiny", "--data", "builtin:zigzag", "--gpus", 0, "-o", file)
    config = load_checked(file)
    assert config.cluster.device == "cpu"
    assert list(config.eval.datasets) == ["builtin:zigzag_heldout"]
    assert plan_verdict(file) == f"✓ {file} fits."


@pytest.mark.parametrize(
    ("data", "key", "reward"),
    [
        ("openai/gsm8k", "question", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "problem", "math"),
        ("agentica-org/DeepScaleR-Preview-Dataset", "problem", "math"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "math"),
        ("someone/something", "prompt", "math"),
    ],
)
def test_known_sets_have_their_fields_and_rewards(data, key, reward, tmp_path):
    file = tmp_path / "my.yaml"
    run_init("--model", "Qwen/Qwen2.5-1.5B-Instruct", "--data", data, "--gpus", 8, "-o", file)
    config = load_checked(file)
    assert config.data.prompt_key == key
    assert list(config.reward.functions) == [reward]
    assert [s.path for s in config.data.train.values()] == [data]
    assert ("CHECK THIS" in file.read_text()) == (data == "someone/something")


def test_the_fields_of_a_file_are_used(tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps({"problem": "1 + 1", "solution": "2"}) + "\n")
    file = tmp_path / "my.yaml"
    run_init(
        "--model", "Qwen/Qwen3-8B", "--data", tmp_path / "mine.jsonl", "--gpus", 8, "--reward", "exact", "-o", file
    )
    config = load_checked(file)
    assert (config.data.prompt_key, config.data.answer_key) == ("problem", "solution")
    assert list(config.reward.functions) == ["exact"]


SUM = {"id": 7, "question": "1 + 1", "answer": "2"}


def save(file: Path, row: dict[str, object]) -> None:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    elif file.suffix == ".csv":
        file.write_text(f"{','.join(row)}\n{','.join(map(str, row.values()))}\n")
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    else:
        file.write_text(json.dumps([row] if file.suffix == ".json" else row))


@pytest.mark.parametrize("name", ["d.csv", "d.parquet", "d.json", "d.jsonl", "d.jsonl.gz", "folder/train.csv"])
def test_fields_are_read_from_the_first_row_whatever_the_format(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    save(Path(name), SUM)
    run_init("--model", "Qwen/Qwen3-8B", "--data", name.partition("/")[0], "--gpus", 8)
    [file] = Path().glob("qwen3-8b-*.yaml")
    assert file.name in ("qwen3-8b-d.yaml", "qwen3-8b-folder.yaml")
    config = load_checked(file)
    assert (config.data.prompt_key, config.data.answer_key) == ("question", "answer")
    assert "the field of a row" not in file.read_text()


@pytest.mark.parametrize(
    ("row", "keys", "marked"),
    [
        ({"text": "1 + 1", "result": "2"}, ("prompt", "answer"), 2),
        ({"question": "1 + 1", "result": "2"}, ("question", "answer"), 1),
        ({"instruction": "Add.", "input": "1 + 1", "output": "2"}, ("instruction", "output"), 1),
        ({"Problem": "1 + 1", "solution": "so 2", "answer": "2"}, ("Problem", "answer"), 1),
    ],
)
def test_unclear_fields_are_marked_and_the_fields_of_the_row_listed(row, keys, marked, tmp_path):
    save(tmp_path / "d.csv", row)
    run_init("--model", "Qwen/Qwen3-8B", "--data", tmp_path / "d.csv", "--gpus", 8, "-o", tmp_path / "my.yaml")
    text, config = (tmp_path / "my.yaml").read_text(), load_checked(tmp_path / "my.yaml")
    assert (config.data.prompt_key, config.data.answer_key) == keys
    assert text.count("# CHECK THIS: the field of a row") == marked
    assert f"its first row has {', '.join(row)}: set" in text


def test_data_without_a_readable_row_is_refused(tmp_path):
    for text, message in {"": "it has no rows", "{": "d.jsonl:1: not JSON"}.items():
        (tmp_path / "d.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=message):
            run_init(
                "--model", "Qwen/Qwen3-8B", "--data", tmp_path / "d.jsonl", "--gpus", 8, "-o", tmp_path / "my.yaml"
            )
    assert not (tmp_path / "my.yaml").exists()


def test_a_file_is_replaced_only_when_told_to(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("precious")
    words = ["--model", "builtin:tiny", "--data", "builtin:zigzag", "--gpus", 0, "-o", file]
    with pytest.raises(ConfigError, match="--force"):
        run_init(*words)
    assert file.read_text() == "precious"
    run_init(*words, "--force")
    assert load_checked(file).trainer.steps == 80


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "./models/Qwen3-8B", "./models/Qwen3-8B/"])
def test_the_file_is_named_for_model_and_data(model):
    assert default_name(InitOptions(model, "openai/gsm8k/", gpus=8)) == "qwen3-8b-gsm8k.yaml"


def test_the_folder_of_the_file_is_created(tmp_path):
    file = tmp_path / "new" / "my.yaml"
    run_init("--model", "builtin:tiny", "--data", "builtin:zigzag", "--gpus", 0, "-o", file)
    assert load_checked(file).trainer.steps == 80
    with pytest.raises(ConfigError, match="is a folder"):
        run_init("--model", "builtin:tiny", "--data", "builtin:zigzag", "--gpus", 0, "-o", tmp_path / "new", "--force")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "Qwen/Qwen2.5-72B", "--data", "openai/gsm8k", "--gpus", 1],
            "does not fit 1 x H100 with room to spare",
        ),
        (["--model", "nobody/nothing", "--data", "openai/gsm8k", "--gpus", 1], "--model-config"),
        (["--model", "Qwen/Qwen3-8B", "--data", "not_here.jsonl", "--gpus", 8], "--data: not_here.jsonl"),
        (["--model", "Qwen/Qwen3-8B", "--data", "openai/gsm8k", "--gpus", 8, "--gpu", "H1000"], "H1000"),
        (
            ["--model", "Qwen/Qwen3-8B", "--data", "openai/gsm8k", "--gpus", 8, "--gpu", "H100:8"],
            "--gpu H100:8: it takes the name of one kind of GPU, such as H100, and --gpus how many",
        ),
        (["--model", "Qwen/Qwen3-8B", "--data", "openai/gsm8k", "--gpus", 8, "--gpu", "2xH100"], "--gpu 2xH100: "),
        (["--model", "Qwen/Qwen3-8B", "--data", "openai/gsm8k", "--gpus", 8, "--reward", "mahts"], "--reward mahts"),
        (["--model", "Qwen/Qwen3-8B", "--data", "builtin:zigzag", "--gpus", 8], "builtin:tiny knows digits only"),
        (["--model", "builtin:two_modes", "--data", "builtin:two_modes", "--gpus", 0], "configs/two_modes_cpu.yaml"),
        (["--model", "builtin:guess", "--data", "builtin:guess", "--gpus", 0], "configs/guess_cpu.yaml"),
        (["--model", "builtin:calculator", "--data", "builtin:calculator", "--gpus", 0], "configs/calculator_cpu.yaml"),
    ],
)
def test_impossible_wishes_are_refused_and_no_file_is_written(words, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        run_init(*words, "-o", tmp_path / "my.yaml")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_nothing_is_asked():
    result = CliRunner().invoke(commands, ["init", "--gpus", "8"])
    assert result.exit_code == 2
    assert "Missing --model, --data" in result.output


def test_a_kind_in_the_number_of_gpus_is_refused_with_a_hint():
    result = CliRunner().invoke(commands, ["init", "--gpus", "8xA100-80"])
    assert result.exit_code == 2
    assert "--gpus 8 --gpu A100-80" in result.output
    assert "--gpus': 'many' is not a valid" in CliRunner().invoke(commands, ["init", "--gpus", "many"]).output


@pytest.mark.parametrize(("gpu", "name"), [("A100 80GB", "A100-80"), ("nvidia l40s", "L40S")])
def test_a_kind_of_gpu_is_written_with_the_name_that_plan_takes(gpu, name, tmp_path):
    file = tmp_path / "my own.yaml"
    output = run_init("--model", "Qwen/Qwen3-4B", "--data", "openai/gsm8k", "--gpus", 8, "--gpu", gpu, "-o", file)
    assert f"next: rlsys plan '{file}' --cluster 8x{name}, then rlsys train '{file}'" in output.replace("\n", " ")
    assert f"# Hardware  8 x {name};" in file.read_text()


def test_every_comment_belongs_to_an_option():
    options = set(flatten(Config()))
    options |= {key.rpartition(".")[0] for key in options}  # sections, such as policy.lora
    assert [key for key in COMMENTS if key not in options] == []


def test_adapters_need_no_offloading_where_full_training_does(tmp_path):
    words = ("--model", "Qwen/Qwen2.5-3B-Instruct", "--data", "openai/gsm8k", "--gpus", 1, "--gpu", "RTX4090")
    full, lora = tmp_path / "full.yaml", tmp_path / "lora.yaml"
    run_init(*words, "-o", full)
    run_init(*words, "--lora", 32, "-o", lora)
    assert load_checked(full).policy.offload == ["optimizer"]
    policy = load_checked(lora).policy
    assert (policy.lora.rank, policy.lora.alpha, policy.lr, policy.offload) == (32, 64, 1e-5, [])
    assert plan_verdict(lora, "--cluster", "1xRTX4090") == f"✓ {lora} fits."


def test_a_model_that_does_not_fit_may_do_so_with_adapters(tmp_path):
    words = ["--model", "Qwen/Qwen3-8B", "--data", "openai/gsm8k", "--gpus", "1", "--gpu", "RTX4090"]
    with pytest.raises(ConfigError, match=r"does not fit .* or --lora 32\.$"):
        run_init(*words, "-o", tmp_path / "my.yaml")
