"""Functions that a user brings."""

import importlib.machinery
import sys

import pytest

from rlsys.config.plugins import explain_missing, load_function
from rlsys.errors import ConfigError


def builtin() -> str:
    return "built in"


TABLE = {"one": builtin, "two": len}


def test_a_name_in_the_table_is_found():
    assert load_function("one", TABLE, "reward.functions") is builtin


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"reward\.functions: `three` is not known\. Built in: one, two"):
        load_function("three", TABLE, "reward.functions")


def test_a_function_of_a_module_is_found():
    import math

    assert load_function("math:sqrt", TABLE, "x") is math.sqrt


def test_a_function_of_a_file_is_found(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def triple(x): return 3 * x\n")
    assert load_function(f"{file}:triple", TABLE, "x")(2) == 6


def test_a_path_may_be_relative_to_where_the_user_is(tmp_path, monkeypatch):
    (tmp_path / "here.py").write_text("def f(): return 'here'\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("here.py:f", TABLE, "x")() == "here"


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"NAME = '{folder}'\ndef f(): return NAME\n")
    first, second = (load_function(f"{tmp_path}/{folder}/same.py:f", TABLE, "x") for folder in ("a", "b"))
    assert (first(), second()) == ("a", "b")


def test_a_missing_function_is_refused_with_the_ones_there(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def triple(x): return 3 * x\ndef _hidden(): pass\nNUMBER = 3\n")
    with pytest.raises(ConfigError, match=r"no function `treble`\. Functions there: triple\."):
        load_function(f"{file}:treble", TABLE, "x")
    with pytest.raises(ConfigError, match="no function `NUMBER`"):
        load_function(f"{file}:NUMBER", TABLE, "x")


def test_a_missing_file_is_refused_with_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"gone\.py does not exist \(from {tmp_path}\)"):
        load_function("gone.py:f", TABLE, "x")


@pytest.mark.parametrize(
    ("source", "reason"),
    [("import no_such_module_1", "ModuleNotFoundError"), ("1 / 0", "ZeroDivisionError"), ("def (", "SyntaxError")],
)
def test_a_file_that_cannot_be_imported_is_refused_with_the_reason(tmp_path, source, reason):
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"x: importing .*broken\.py .*failed: {reason}"):
        load_function(f"{file}:f", TABLE, "x")


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"importing no_such_module_1 .*ModuleNotFoundError"):
        load_function("no_such_module_1:f", TABLE, "x")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("here.py:f", ""),
        ("here.py:Kind", ""),
        ("here.py:alias", ""),
        ("here.py:late", ""),
        ("here.py:g", "here.py has no function `g`. Functions there: Kind"),
        ("all.py:g", ""),  # as far as that is seen
        ("made.py:g", ""),
        ("none.py:f", "the file none.py (of `none.py:f`) does not exist"),
        ("broken.py:f", "broken.py is not Python: invalid syntax (broken.py, line 2)"),
        ("here:f", ""),
        ("json.decoder:loads", ""),
        ("numpy.linalg:norm", ""),
        ("no_such_module.part:f", "there is no module no_such_module.part (of `no_such_module.part:f`)"),
        ("here.py:", "`here.py:` names no function; write here.py:my_function"),
        ("here.py:f()", "`here.py:f()` names no function"),
    ],
)
def test_what_cannot_be_had_is_seen_without_running_it(spec, problem, tmp_path, monkeypatch):
    (tmp_path / "here.py").write_text(
        "from os import path as alias\nif 1:\n    def f(): _own = 1\nlate = f\nclass Kind: ...\n"
    )
    (tmp_path / "all.py").write_text("from here import *\nraise SystemExit\n")
    (tmp_path / "made.py").write_text("globals()['g'] = 1\nraise SystemExit\n")
    (tmp_path / "broken.py").write_text("import os\ndef f(:\n")
    monkeypatch.chdir(tmp_path)
    found = explain_missing(spec)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_a_module_that_an_editable_install_has_its_own_finder_for_is_there(monkeypatch):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, None) if name == "edited_in_place" else None

    assert explain_missing("edited_in_place.rewards:f")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert not explain_missing("edited_in_place.rewards:f")
    assert explain_missing(".relative:f")
