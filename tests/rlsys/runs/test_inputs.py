"""A run goes on with the data, the models and the functions that it began with, or not at all."""

import json
import shutil

import numpy as np
import pytest
from fakes import make_config, make_dataset, make_prompt
from machines import Machines, learned
from safetensors.torch import load_file, save_file

from launch import datasets
from rlsys.data import Dataset
from rlsys.errors import ConfigError
from rlsys.models.config_json import ModelLimits
from rlsys.runs.directory import RunDirectory
from rlsys.runs.inputs import describe_changed_rows, hash_weights
from rlsys.tasks import zigzag

ROWS = [{"prompt": f"{n:06}>", "answer": str(n)} for n in range(40)]


def begin(config):
    run = RunDirectory(config)
    run.record_metrics({"step": 0})
    run.close()


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(config):
    return datasets.load(config, zigzag.make_tokenizer(), ModelLimits(64), lambda _: None)


def check(config):
    """What a start does with data, for a run that has begun."""
    run, loaded = RunDirectory(config), load(config)
    try:
        return run.check_rows(config, loaded.train, {h.name: h.prompts for h in loaded.held_out})
    finally:
        run.record_metrics({"step": 0})
        run.close()


# --- rows ------------------------------------------------------------------------------------------------------------------

EDITS = [
    (lambda rows: [*rows, {"prompt": "999999>"}], "40 rows before, 41 now; 1 added, 0 removed"),
    (lambda rows: rows[1:], "40 rows before, 39 now; 0 added, 1 removed"),
    (lambda rows: [rows[1], rows[0], *rows[2:]], "2 of 40 rows are in another place"),
    (lambda rows: [rows[0] | {"answer": "7"}, *rows[1:]], "1 of 40 rows changed"),
    (lambda rows: [row | {"extra": 1} for row in rows], "40 of 40 rows changed"),
    (lambda rows: [*rows[:-1], rows[0]], "1 of 40 rows changed"),
    (lambda rows: [rows[1], rows[0] | {"answer": "7"}, *rows[2:]], "40 rows before, 40 now; 1 added, 1 removed"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
@pytest.mark.parametrize("sets", [1, 2])
def test_a_run_does_not_go_on_with_other_rows(tmp_path, edit, message, sets):
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(tmp_path / name, ROWS)
    write_rows(tmp_path / "b.jsonl", ROWS if sets == 1 else ROWS[::-1])
    names = [tmp_path / "b.jsonl"] if sets == 1 else [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    config = make_config(tmp_path, f"data.train=[{','.join(map(str, names))}]")
    assert check(config) == []
    assert check(config) == []
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "b.jsonl", edit(rows))
    with pytest.raises(ConfigError, match=r"Restore them, or choose another run\.dir") as error:
        check(config)
    assert f"b.jsonl: {message}" in str(error.value)
    assert "a.jsonl: " not in str(error.value)
    write_rows(tmp_path / "b.jsonl", rows)
    assert check(config) == []


def test_a_moved_file_is_the_same_data_and_a_file_of_the_same_name_is_not(tmp_path):
    (tmp_path / "moved").mkdir()
    write_rows(tmp_path / "a.jsonl", ROWS)
    assert check(make_config(tmp_path, f"data.train={tmp_path}/a.jsonl")) == []
    (tmp_path / "a.jsonl").rename(tmp_path / "moved" / "a.jsonl")
    moved = make_config(tmp_path, f"data.train={tmp_path}/moved/a.jsonl")
    assert check(moved) == []
    write_rows(tmp_path / "moved" / "a.jsonl", ROWS[1:])
    with pytest.raises(ConfigError, match="1 removed"):
        check(moved)


def test_other_held_out_rows_are_noted_and_from_then_on_the_runs_own(tmp_path):
    write_rows(tmp_path / "a.jsonl", ROWS)
    config = make_config(tmp_path, f"eval.datasets={tmp_path}/a.jsonl")
    assert check(config) == []
    write_rows(tmp_path / "a.jsonl", ROWS[:-1])
    [note] = check(config)
    assert "1 removed. Its figures before and after are not of the same prompts" in note
    assert check(config) == []


def test_a_run_of_before_is_accepted_with_a_note(tmp_path):
    write_rows(tmp_path / "a.jsonl", ROWS)
    config = make_config(tmp_path, f"data.train={tmp_path}/a.jsonl")
    check(config)
    (tmp_path / "run" / "rows.npz").unlink()
    [note] = check(config)
    assert "no record of its rows" in note
    assert check(config) == []


def test_a_run_from_before_final_messages_were_refused_goes_on_with_the_option_that_the_error_names(tmp_path):
    """A failed start has written the new configuration already, in which the option is false."""
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    begun = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    write_rows(tmp_path / "a.jsonl", [{"prompt": begun}, {"prompt": begun[:1]}])
    options = [f"data.train={tmp_path}/a.jsonl", f"data.template={tmp_path}/mine.jinja"]
    old, option = make_config(tmp_path, *options), "data.continue_final_message"
    begin(old)
    recorded = tmp_path / "run" / "config.yaml"
    recorded.write_text(
        "".join(f"{x}\n" for x in recorded.read_text().splitlines() if option.partition(".")[2] not in x)
    )
    with pytest.raises(ConfigError, match=f"set {option} to true"):
        check(old)
    [note] = check(make_config(tmp_path, *options, f"{option}=true"))
    assert "no record of its rows" in note
    assert check(make_config(tmp_path, *options, f"{option}=true")) == []
    with pytest.raises(ConfigError, match=f"set {option} to true"):
        check(old)


def test_that_option_cannot_change_the_rows_of_a_run_that_has_a_record_of_them(tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    begun = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    write_rows(tmp_path / "a.jsonl", [{"prompt": begun}, {"prompt": begun[:1]}])
    options = [f"data.train={tmp_path}/a.jsonl", f"data.template={tmp_path}/mine.jinja", "data.on_bad_row=skip"]
    check(make_config(tmp_path, *options))
    with pytest.raises(ConfigError, match="1 rows before, 2 now; 1 added"):
        check(make_config(tmp_path, *options, "data.continue_final_message=true"))


def test_the_trainer_refuses_rows_in_another_order_and_an_untouched_run_goes_on(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = Machines(tmp_path / "whole", "trainer.steps=4").run()
    Machines(tmp_path, "trainer.steps=2").run()
    with pytest.raises(ConfigError, match=r"the order of the training prompts: .* in another place"):
        Machines(tmp_path, "trainer.steps=4", make_rows=lambda n, **k: make_dataset(n, seed=1, **k)).run()
    (tmp_path / "again").mkdir()
    Machines(tmp_path / "again", "trainer.steps=2").run()
    assert learned(Machines(tmp_path / "again", "trainer.steps=4").run().lines) == learned(whole.lines)


def test_rows_given_as_a_list_show_every_change(tmp_path):
    config = make_config(tmp_path)
    run = RunDirectory(config)
    prompts = [make_prompt(f"p{i}", answer=i) for i in range(4)]
    run.check_rows(config, Dataset(prompts), {})
    run.begun = True
    for changed in (make_prompt("p0", answer=9), make_prompt("p0", text="864153>", answer=0)):
        with pytest.raises(ConfigError, match="1 of 4 rows changed"):
            run.check_rows(config, Dataset([changed, *prompts[1:]]), {})
    run.close()


def test_repeated_rows_are_counted():
    a, b = np.array([1, 1, 2], np.uint64), np.array([1, 2, 2, 2], np.uint64)
    assert describe_changed_rows("x", a, b) == "x: 3 rows before, 4 now; 2 added, 1 removed"


# --- files ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    shutil.copytree(zigzag.model_folder(0), tmp_path / "model")
    return tmp_path / "model"


def change_weights(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({k: v * 1.5 for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def change_one_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    last = sorted(weights)[-1]
    save_file(weights | {last: weights[last] + 1e-3}, folder / "model.safetensors", {"format": "pt"})


def append(name):
    def change(folder):
        with (folder / name).open("a") as file:
            file.write("\n")

    return change


CHANGES = [
    (change_weights, "model.safetensors"),
    (change_one_tensor, "model.safetensors"),
    (append("config.json"), "config.json"),
    (append("tokenizer.json"), "tokenizer.json"),
    (lambda folder: (folder / "chat_template.jinja").write_text("a"), r"chat_template.jinja \(added\)"),
    (lambda folder: (folder / "tokenizer_config.json").unlink(), r"tokenizer_config.json \(removed\)"),
]


@pytest.mark.parametrize(("change", "file"), CHANGES)
@pytest.mark.parametrize("option", ["model.path", "reference.path"])
def test_a_run_does_not_go_on_with_another_model(tmp_path, model, change, file, option):
    more = ["reference.kl_coef=0.1"] if option == "reference.path" else []
    config = make_config(tmp_path, f"{option}={model}", *more)
    begin(config)
    change(model)
    with pytest.raises(ConfigError, match=f"{option}: {file} changed"):
        RunDirectory(config)
    before = (tmp_path / "run" / "inputs.json").read_text()
    with pytest.raises(ConfigError, match="Restore them"):
        RunDirectory(config)
    assert (tmp_path / "run" / "inputs.json").read_text() == before


def test_a_model_that_was_moved_is_the_same_and_another_one_or_one_that_is_not_here_is_not(tmp_path, model):
    begin(make_config(tmp_path, f"model.path={model}"))
    (model / "README.md").write_text("of no effect")
    model.rename(tmp_path / "moved")
    begin(make_config(tmp_path, f"model.path={tmp_path}/moved"))
    with pytest.raises(ConfigError, match=r"model\.path: .* → some/model"):
        RunDirectory(make_config(tmp_path, "model.path=some/model"))
    change_weights(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"model\.safetensors changed"):
        RunDirectory(make_config(tmp_path, f"model.path={tmp_path}/moved"))


@pytest.mark.parametrize(
    "option", ["reward.functions={FILE:judge: 1.0}", "data.train={builtin:zigzag: {reward: {FILE:judge: 1.0}}}"]
)
def test_a_run_does_not_go_on_with_another_reward_file(tmp_path, option):
    file = tmp_path / "mine.py"
    file.write_text("def judge(completion):\n    return 1.0\n")
    config = make_config(tmp_path, option.replace("FILE", str(file)))
    begin(config)
    begin(config)
    file.write_text("def judge(completion):\n    return 2.0\n")
    with pytest.raises(ConfigError, match=r"mine\.py has changed"):
        RunDirectory(config)


def test_a_model_of_the_hub_is_recorded_with_its_commit_once_it_is_here(tmp_path, model, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    config = make_config(tmp_path, "model.path=some/model")
    run = RunDirectory(config)
    stored = tmp_path / "hub" / "models--some--model"
    for commit in ("aaa", "bbb"):
        shutil.copytree(model, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("aaa")
    run.record_inputs(config)
    run.record_metrics({"step": 0})
    run.close()
    assert json.loads((tmp_path / "run" / "inputs.json").read_text())["model.path"]["commit"] == "aaa"
    (stored / "refs" / "main").write_text("bbb")  # which has the same files
    (stored / "snapshots" / "bbb" / "tokenizer.json").unlink(missing_ok=True)  # not downloaded yet
    (stored / "snapshots" / "bbb" / "added_tokens.json").write_text("{}")  # only now
    RunDirectory(config).close()
    (stored / "snapshots" / "bbb" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path: config\.json changed"):
        RunDirectory(config)


@pytest.mark.parametrize("name", ["inputs.json", "rows.npz"])
@pytest.mark.parametrize("text", ["", "PK\x03\x04 half of it", "[1"])
def test_a_damaged_record_is_named_with_a_way_out(tmp_path, name, text):
    Machines(tmp_path, "trainer.steps=1").run()
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name} is damaged .*Remove it"):
        Machines(tmp_path, "trainer.steps=2").run()


def test_weights_in_another_format_show_a_change_too(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(bytes(3_000_000))
    before = hash_weights(file)
    file.write_bytes(b"\x01" * 3_000_000)
    assert hash_weights(file) != before
