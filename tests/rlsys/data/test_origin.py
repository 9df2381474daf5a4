"""What a path or a name is: a file, a folder, a data set of the hub."""

import pytest
from data_files import lines, prompts, read_rows_of, table

from rlsys.data import Origin
from rlsys.data.origin import locate_data
from rlsys.errors import ConfigError

# --- folders and Hugging Face data sets -------------------------------------------------------------------------------


def test_a_folder_is_its_files_in_order(tmp_path):
    for n in (2, 1):
        lines(tmp_path / "shards", {"prompt": f"{n}"}, name=f"part-{n}.jsonl")
    table(tmp_path / "shards", [{"prompt": "0"}], name="part-0.parquet")
    lines(tmp_path / "shards" / ".cache", {"prompt": "x"}, name="x.jsonl")
    rows, bad = read_rows_of(tmp_path / "shards")
    assert (prompts(rows), bad) == (["0", "1", "2"], [])
    assert [r.location.rpartition("/")[2] for r in rows] == ["part-0.parquet:1", "part-1.jsonl:1", "part-2.jsonl:1"]


def test_a_copy_of_a_hub_repository_has_splits_and_subsets(tmp_path):
    for subset in ("main", "socratic"):
        for name in ("train", "test"):
            table(tmp_path / "gsm8k", [{"prompt": f"{subset} {name}"}], name=f"{subset}/{name}-00000-of-00001.parquet")
    assert prompts(read_rows_of(tmp_path / "gsm8k", subset="main", split="test")[0]) == ["main test"]
    assert prompts(read_rows_of(tmp_path / "gsm8k", subset="socratic")[0]) == ["socratic train"]
    with pytest.raises(ConfigError, match="no folder `mian` for its subset; folders there: main, socratic"):
        read_rows_of(tmp_path / "gsm8k", subset="mian")
    with pytest.raises(ConfigError, match="no files of a split `validation`; it has test, train"):
        read_rows_of(tmp_path / "gsm8k", subset="main", split="validation")


def test_a_damaged_file_of_a_folder_costs_no_other_file(tmp_path):
    table(tmp_path / "shards", [{"prompt": "0"}], name="0.parquet")
    lines(tmp_path / "shards", "nonsense", name="1.parquet")
    rows, [bad] = read_rows_of(tmp_path / "shards")
    assert (prompts(rows), bad.file.rpartition("/")[2]) == (["0"], "1.parquet")


def test_what_the_datasets_library_has_saved_is_read(tmp_path):
    import datasets

    one = datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "two")
    assert [r.fields for r in read_rows_of(tmp_path / "one")[0]] == [
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": 2},
    ]
    rows, bad = read_rows_of(tmp_path / "two", split="test")
    assert ([r.location for r in rows], prompts(rows), bad) == ([f"{tmp_path}/two:1"], ["b"], [])
    with pytest.raises(ConfigError, match="no split `dev`; it has train, test"):
        read_rows_of(tmp_path / "two", split="dev")


def test_a_saved_data_set_that_is_damaged_is_refused(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "one")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="one cannot be loaded: "):
        read_rows_of(tmp_path / "one")


def test_a_hub_name_goes_to_the_datasets_library(tmp_path, monkeypatch):
    import datasets

    loads = []

    def load_dataset(*arguments, **options):
        loads.append((arguments, options))
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    rows, _ = read_rows_of("openai/gsm8k", subset="main", split="test")
    assert [r.location for r in rows] == ["openai/gsm8k:1"]
    assert loads == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_why_a_hub_name_cannot_be_had_is_said(tmp_path, monkeypatch):
    import datasets

    def load_dataset(*arguments, **options):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"openai/gsm8k cannot be loaded: ConnectionError: Couldn't reach .* if a file was meant"
    ):
        read_rows_of("openai/gsm8k")


# --- what a path is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.jsonl", "gone.jsonl does not exist"),
        ("data/*.jsonl", "It is taken as one name; give a folder, or files as a list: [a.jsonl, b.jsonl]."),
        ("a.jsonl,b.jsonl", "It is taken as one name"),
        ("data/gone", "data/gone does not exist"),
        ("gsm8k", "gsm8k does not exist"),
        ("./openai/gsm8k", "does not exist"),
        ("builtin:zagzig", "builtin:zagzig does not exist; built in: builtin:zigzag"),
        ("notes.txt", "notes.txt must end in .jsonl, "),
        ("nothing", "nothing holds no data"),
    ],
)
def test_what_is_no_data_is_refused_with_a_reason(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError) as error:
        locate_data(Origin(path))
    assert message in str(error.value)


def test_a_single_file_has_no_splits(tmp_path):
    path = lines(tmp_path, {"prompt": "a"})
    for options in ({"split": "test"}, {"subset": "main"}):
        with pytest.raises(ConfigError, match="is one file; it has no splits"):
            locate_data(Origin(path, **options))


def test_a_name_with_an_owner_that_is_no_folder_here_is_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate_data(Origin("openai/gsm8k")).kind == "hub"
    (tmp_path / "openai").mkdir()
    with pytest.raises(ConfigError, match="openai/gsm8k does not exist"):
        locate_data(Origin("openai/gsm8k"))
