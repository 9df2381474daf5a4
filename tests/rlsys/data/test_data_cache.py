"""The cache of prepared data sets."""

import os
import threading
from pathlib import Path

import pytest
from data_files import lines, table

from rlsys import data
from rlsys.data import DatasetPreparer, Origin, PromptFormat, SelectionRules, cache, prepare, store
from rlsys.errors import ConfigError
from rlsys.tasks import zigzag


class Counting:
    """A tokenizer that counts the texts it has seen."""

    def __init__(self):
        self.inner, self.texts = zigzag.make_tokenizer(), 0

    def __call__(self, texts, **options):
        self.texts += len(texts)
        return self.inner(texts, **options)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture(autouse=True)
def everything_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "SMALL_BYTES", 0)


@pytest.fixture
def path(tmp_path):
    return lines(tmp_path, *[{"prompt": f"{n:03}>", "answer": n} for n in range(50)], "nonsense", *["[]"] * 20)


def prepared(path, tokenizer, notes=None, **form):
    return DatasetPreparer(tokenizer, (notes if notes is not None else []).append)(
        Origin(str(path)), PromptFormat(**form)
    )


def prompts(stored, most=7):
    return list(data.select_rows(Origin("a"), stored, SelectionRules(most, on_bad_row="skip", overlong="skip")))


def folders():
    return sorted(p for p in cache.data_cache_dir().iterdir())


def test_a_second_run_tokenizes_nothing(path):
    first, second, notes = Counting(), Counting(), []
    one, two = prepared(path, first, notes), prepared(path, second)
    assert (first.texts, second.texts) == (50, 0)
    assert prompts(one) == prompts(two)
    assert one.facts == two.facts
    assert two.read_all_bad() == one.read_all_bad()
    assert len(two.read_all_bad()) == 21
    assert len(two.first_bad) == 10
    assert notes == [f"sums: prepared for later runs too, in {folders()[0]} (0 MiB)"]


def test_what_is_small_is_prepared_in_memory_and_the_same(path, monkeypatch):
    kept = prepared(path, zigzag.make_tokenizer())
    monkeypatch.setattr(cache, "SMALL_BYTES", 1 << 20)
    small = Counting()
    passing = prepared(path, small)
    assert small.texts == 50
    assert prompts(passing) == prompts(kept)
    assert passing.read_all_bad() == kept.read_all_bad()
    assert len(folders()) == 1


def test_only_a_model_that_lacks_tokens_of_the_tokenizer_has_rows_of_its_own(path):
    """The tokens 0..12 are the zigzag task's; 12 ends each prompt."""
    tokenizer = Counting()
    kept = [DatasetPreparer(tokenizer, print, v)(Origin(path), PromptFormat()) for v in (0, 13, 14, 12, 12)]
    assert [len(prompts(stored)) for stored in kept[:3]] == [50] * 3
    assert [stored.facts.bad.get("with tokens that the model lacks") for stored in kept] == [None, None, None, 50, 50]
    assert (tokenizer.texts, len(folders())) == (100, 2)


def test_how_long_prompts_may_be_is_not_part_of_what_is_kept(path):
    tokenizer = Counting()
    assert len(prompts(prepared(path, tokenizer), 7)) == 50
    with pytest.raises(ConfigError, match="all 50 are longer than 3 tokens"):
        prompts(prepared(path, tokenizer), 3)
    assert tokenizer.texts == 50


def test_whatever_decides_the_prompts_makes_another(path, tmp_path, monkeypatch):
    tokenizer = Counting()
    prepared(path, tokenizer)
    (tmp_path / "a.jinja").write_text("{{ prompt }}")
    prepared(path, tokenizer, answer_key="solution")
    prepared(path, tokenizer, template=str(tmp_path / "a.jinja"))
    (tmp_path / "a.jinja").write_text("{{ prompt }}>")
    prepared(path, tokenizer, template=str(tmp_path / "a.jinja"))
    monkeypatch.setattr(prepare, "VERSION", 99)
    prepared(path, tokenizer)
    other = Counting()
    other.inner.add_tokens(["42"])
    prepared(path, other)
    assert (tokenizer.texts, other.texts, len(folders())) == (250, 50, 6)


def test_a_changed_file_is_prepared_anew(path):
    tokenizer = Counting()
    prepared(path, tokenizer)
    text = Path(path).read_text()
    Path(path).write_text(text.replace("049>", "94>"))
    assert prompts(prepared(path, tokenizer))[-1].text == "94>"
    Path(path).write_text(text)
    assert prompts(prepared(path, tokenizer))[-1].text == "049>"
    assert tokenizer.texts == 100


def test_the_same_tokenizer_from_another_place_is_the_same(path, tmp_path):
    from transformers import AutoTokenizer

    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        zigzag.make_tokenizer().save_pretrained(folder)
    first, second = Counting(), Counting()
    first.inner, second.inner = AutoTokenizer.from_pretrained(one), AutoTokenizer.from_pretrained(two)
    prepared(path, first)
    prepared(path, second)
    assert (first.texts, second.texts) == (50, 0)


def test_a_large_file_is_known_by_size_and_time_of_change(path, monkeypatch):
    monkeypatch.setattr(cache, "MAX_HASHED_BYTES", 10)
    tokenizer = Counting()
    prepared(path, tokenizer)
    prepared(path, tokenizer)
    assert tokenizer.texts == 50
    os.utime(path, ns=(1, 1))
    prepared(path, tokenizer)
    assert tokenizer.texts == 100


def test_a_changed_file_whose_time_was_set_back_is_prepared_again(path, monkeypatch):
    monkeypatch.setattr(cache, "MAX_HASHED_BYTES", 10)
    tokenizer, before = zigzag.make_tokenizer(), os.stat(path)
    prepared(path, tokenizer)
    text = Path(path).read_text()
    Path(path).write_text(text.replace("007>", "700>"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "700>" in [p.text for p in prompts(prepared(path, tokenizer))]


def test_a_saved_data_set_whose_files_were_changed_is_prepared_anew(tmp_path):
    import datasets

    for name in "ab":
        datasets.Dataset.from_list([{"prompt": f"{'ab'.index(name)}>"}]).save_to_disk(tmp_path / name)
    tokenizer = Counting()
    prepared(tmp_path / "a", tokenizer)
    prepared(tmp_path / "a", tokenizer)
    assert tokenizer.texts == 1
    [old], [new] = (list((tmp_path / name).glob("*.arrow")) for name in "ab")
    old.unlink()
    old.write_bytes(new.read_bytes())
    assert [p.text for p in prompts(prepared(tmp_path / "a", tokenizer))] == ["1>"]


@pytest.mark.parametrize("damage", ["facts.json", "rows.arrow", "bad.jsonl"])
def test_what_is_not_whole_is_made_again(path, damage):
    tokenizer = Counting()
    good = prompts(prepared(path, tokenizer))
    file = folders()[0] / damage
    file.write_bytes(file.read_bytes()[:10])
    assert prompts(prepared(path, tokenizer)) == good
    assert tokenizer.texts == 100
    assert prompts(prepared(path, tokenizer)) == good
    assert tokenizer.texts == 100


def test_a_cache_that_cannot_be_written_is_done_without(path, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    notes = []
    stored = prepared(path, zigzag.make_tokenizer(), notes)
    assert len(prompts(stored)) == 50
    assert len(stored.read_all_bad()) == 21
    assert "cannot be written" in notes[0]
    assert "temporary folder" in notes[0]


def test_a_disk_that_is_full_is_done_without_and_leaves_nothing_behind(path, tmp_path, monkeypatch):
    real, calls = store.RowWriter.finish, []

    def full_at_first(writer):
        calls.append(writer)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return real(writer)

    monkeypatch.setattr(store.RowWriter, "finish", full_at_first)
    notes = []
    assert len(prompts(prepared(path, zigzag.make_tokenizer(), notes))) == 50
    assert "No space left on device" in notes[0]
    assert folders() == []
    calls.clear()
    monkeypatch.setattr(
        store.RowWriter, "finish", lambda writer: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(ConfigError, match=r"cannot be written, neither to .* XDG_CACHE_HOME"):
        prepared(path, zigzag.make_tokenizer())


def test_what_goes_wrong_in_the_pass_leaves_nothing_behind(path):
    with pytest.raises(ConfigError, match="no chat template"):
        prepared(path, zigzag.make_tokenizer(), as_chat=True)
    assert folders() == []


def test_two_runs_may_make_the_same_at_once(path):
    results, begin = [], threading.Barrier(4)

    def run():
        begin.wait()
        results.append(prompts(prepared(path, zigzag.make_tokenizer())))

    runs = [threading.Thread(target=run) for _ in range(4)]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)
    assert len(folders()) == 1


def test_rows_of_a_map_are_read_at_random_in_pieces_of_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "MAX_ROWS", 7)
    rows = [{"prompt": f"{n:03}>", "answer": [{"n": n}]} for n in range(40)]
    stored = prepared(table(tmp_path, rows), zigzag.make_tokenizer())
    chosen = data.select_rows(Origin("a"), stored, SelectionRules(7))
    assert [chosen[i].text for i in (39, 0, 7, 6, -1)] == ["039>", "000>", "007>", "006>", "039>"]
    assert chosen[5].row == {"answer": [{"n": 5}]}
    assert [p.text for p in chosen[3:6]] == ["003>", "004>", "005>"]
    with pytest.raises(IndexError):
        chosen[40]


def test_a_long_pass_says_how_far_it_is(path, monkeypatch):
    monkeypatch.setattr(prepare, "NOTE_INTERVAL_S", 0.0)
    monkeypatch.setattr(prepare, "MAX_ROWS", 20)
    notes = []
    prepared(path, zigzag.make_tokenizer(), notes)
    assert f"{path}: 20 rows prepared, " in notes[0]
    assert len(notes) == 5
