"""The reward `code`: what it accepts, and how programs try to be accepted without being right."""

import ast
import asyncio
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processors import one_processor

from rlsys import sandbox
from rlsys.errors import ConfigError
from rlsys.rewards.code.program import (
    check_code,
    code,
    compile_calls,
    extract_program,
    isolation_note,
    prepare,
    require_processor,
    same_output,
)
from rlsys.sandbox import runner
from rlsys.sandbox.levels import IsolationLevel
from rlsys.sandbox.outcome import ProgramResult, SandboxError

ADD = "def add(a, b):\n    return a + b"
SUM = "print(sum(map(int, input().split())))"
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def score(program: str, tests, entry_point: str | None = "", **options) -> float:
    return code(block(program), tests, entry_point, **options)


@pytest.fixture(autouse=True)
def nothing_is_left():
    descriptors, children = len(os.listdir("/proc/self/fd")), set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= children
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- the program in a completion --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("first\n```python\na\n```\nbetter\n```python\nb\n```\nbye", "b\n"),
        ("```python\na\n```\nit prints\n```\n3\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\n```cpp\nb\n```", "a\n"),
        ("```Python3\na\n```", "a\n"),
        ("```python title='x'\na\n```", "a\n"),
        ("```cpp\nb\n```", None),
        ("no fence", None),
        ("```python\ncut off", None),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("1. so:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("```python\n```", "\n"),
        ("", None),
    ],
)
def test_the_program_is_the_last_block_of_python(completion, program):
    assert extract_program(completion) == program


def test_a_long_completion_is_searched_quickly():
    begin = time.monotonic()
    for piece in ("```python\n", "```", "```\n", "` ` ``` \n", "```python\na\n```\n"):
        extract_program(piece * 100_000)
    assert time.monotonic() - begin < 5


def test_without_a_fence_nothing_runs_unless_unfenced_is_on():
    assert code(SUM, SUMS) == 0.0
    assert code(SUM, SUMS, unfenced=True) == 1.0
    assert code("I would say\n```cpp\n1\n```", SUMS, unfenced=True) == 0.0


# --- forms of tests ---------------------------------------------------------------------------------------------------

FORMS = {
    "asserts": (ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], ""),
    "asserts in one text": (ADD, "x = add(1, 2)\nassert x == 3\nfor i in range(3):\n    assert add(i, 0) == i", ""),
    "asserts as JSON": (ADD, json.dumps(["assert add(1, 2) == 3"]), ""),
    "asserts under a guard": (ADD, "if __name__ == '__main__':\n    assert add(1, 2) == 3", ""),
    "check": (ADD, "METADATA = {}\ndef check(candidate):\n    assert candidate(1, 2) == 3\n", "add"),
    "check that is called": (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)", ""),
    "test functions": (
        ADD,
        "def test_one():\n    assert add(1, 2) == 3\ndef test_two():\n    assert add(2, 2) == 4",
        "",
    ),
    "unittest": (
        ADD,
        "import unittest\nclass Sums(unittest.TestCase):\n"
        "    def setUp(self): self.one = 1\n"
        "    def test_sum(self): self.assertEqual(add(self.one, 2), 3)\n"
        "    def test_types(self):\n        with self.assertRaises(TypeError): add(1)\n"
        "if __name__ == '__main__':\n    unittest.main()",
        "",
    ),
    "standard input": (SUM, SUMS, ""),
    "standard input as JSON": (SUM, json.dumps(SUMS), ""),
    "standard input by lines": ("print(input() + input())", {"inputs": [["a", "b"]], "outputs": [["ab"]]}, ""),
    "standard input one by one": (SUM, [{"input": "1 2", "output": "3"}], ""),
    "calls": (ADD, {"inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"], "fn_name": "add"}, ""),
    "calls whose results are wrapped": (ADD, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, ""),
    "calls whose arguments are lines": (ADD, [{"input": "[1]\n[2]", "output": "[1, 2]"}], "add"),
    "calls of a method": (
        "class Solution:\n    def add(self, a, b):\n        return (a, {b: 1})",
        {"inputs": [[1, 2]], "outputs": [[1, {"2": 1}]], "fn_name": "add"},
        "",
    ),
    "check of a method": (
        "class Solution:\n    def add(self, a, b):\n        return a + b",
        "def check(candidate):\n    assert candidate(a=1, b=2) == 3",
        "Solution().add",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_scores_1(form):
    assert score(*FORMS[form]) == 1.0


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_program_scores_0(form):
    program, tests, entry_point = FORMS[form]
    wrong = program.replace("a + b", "None").replace("(a, {b: 1})", "[]").replace("print(", "print('no', ")
    assert score(wrong, tests, entry_point) == 0.0


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ({"inputs": [["11", "1"]], "outputs": ["100"]}, ["'100'", "100"], ["'10'", "'100.0'", "10"]),
        ({"inputs": [["11", "1"]], "outputs": [["100"]]}, ["'100'"], ["100"]),
        ({"inputs": [["11", "1"]], "outputs": ['"100"']}, ["'100'"], ["100"]),
        ({"inputs": [[1, 2]], "outputs": ["true"]}, ["'true'", "True"], ["'True'", "False"]),
        ({"inputs": [[1, 2]], "outputs": ["[3]"]}, ["[3]", "3", "'[3]'"], ["'3'", "[4]"]),
        ([{"input": "1\n2", "output": "100"}], ["100"], ["'100'"]),
        ([{"input": "1\n2", "output": '"100"'}], ["'100'"], ["100", "'\"100\"'"]),
        ([{"input": "1\n2", "output": "yes"}], ["'yes'"], ["'no'", "True"]),
    ],
)
def test_an_expected_text_is_json_or_plain_text(test, right, wrong):
    for value in right:
        assert score(f"def f(a, b): return {value}", test, "f") == 1.0
    for value in wrong:
        assert score(f"def f(a, b): return {value}", test, "f") == 0.0


def test_the_entry_point_of_a_row_may_be_null():
    assert score(ADD, ["assert add(1, 2) == 3"], None) == 1.0
    assert score(SUM, SUMS, None) == 1.0


@pytest.mark.parametrize("level", [level for level in IsolationLevel if not runner.why_unavailable(level)])
def test_all_levels_give_the_same_verdicts(level):
    for program, verdict in ((ADD, 1.0), (ADD.replace("+", "-"), 0.0)):
        assert score(program, ["assert add(1, 2) == 3"], isolation=level) == verdict
    assert score(SUM, SUMS, isolation=level) == 1.0


def test_with_share_the_score_is_the_share_of_passed_tests():
    tests = ["assert add(1, 2) == 3", "assert add(5, 0) == 5", "assert add(0, 0) == 0", "assert add(1, 1) == 2"]
    assert score("def add(a, b): return a - b", tests, share=True) == 0.5
    assert score("def add(a, b): return a - b", "\n".join(tests), share=True) == 0.5
    assert score("print(3)", SUMS, share=True) == 0.5
    assert (
        score("def add(a, b): return 3", {"inputs": [[1, 2], [2, 2]], "outputs": [3, 4], "fn_name": "add"}, share=True)
        == 0.5
    )
    assert score("def sub(a, b): return 3", tests, share=True) == 0.0
    assert score("1 / 0", tests, share=True) == 0.0
    late = "def add(a, b):\n    while a == 5: pass\n    return a + b"
    assert score(late, tests, share=True, timeout_s=1) == 0.25, "the tests after one that hangs have not passed"


@pytest.mark.parametrize(
    ("got", "expected", "tolerance", "verdict"),
    [
        ("3\n", "3", 0, True),
        ("  1   2 \n3\n\n", "1 2\n3\n", 0, True),
        ("3.0", "3", 0, False),
        ("3.0", "3", 1e-6, True),
        ("1000.0005", "1000", 1e-6, True),
        ("1000.01", "1000", 1e-6, False),
        ("yes 0.333333", "yes 0.33333333", 1e-4, True),
        ("no 0.333333", "yes 0.33333333", 1e-4, False),
        ("nan", "1", 1e-6, False),
        ("inf", "1", 1e-6, False),
        ("3 4", "3", 1e-6, False),
        ("1_0", "10", 0, False),
        ("", "3", 0, False),
        ("", "", 0, True),
    ],
)
def test_outputs_are_compared_word_by_word(got, expected, tolerance, verdict):
    assert same_output(got, expected, tolerance) is verdict


def test_returned_numbers_may_differ_by_the_tolerance():
    tests = {"inputs": [[1, 3]], "outputs": [[0.333333333333, 3]], "fn_name": "f"}
    assert score("def f(a, b): return (a / b, b)", tests) == 0.0
    assert score("def f(a, b): return (a / b, b)", tests, tolerance=1e-9) == 1.0


def test_a_long_expected_output_may_be_printed():
    tests = {"inputs": ["200000"], "outputs": ["\n".join(map(str, range(200_000)))]}
    assert score("print(*range(int(input())), sep='\\n')", tests) == 1.0


# --- what the wire carries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return x", "for v in [None, True, 1, 2**5000, 0.1, -0.0, 1e999, 'ä\\ud800', b'\\0', (1, [2, {3: {4}}]), 1j]:\n    assert f(v) == v and type(f(v)) is type(v)"),
        ("def f(x): x.sort()", "x = [2, 1]\nassert f(x) is None\nassert x == [1, 2]"),
        ("def f(x): x['b'] = {2}", "x = {'a': 1}\nf(x)\nassert x == {'a': 1, 'b': {2}}"),
        ("def f(*a, k=0): return len(a) + k", "assert f(1, 2, k=3) == 5"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(): return P(1)", "assert f() == (1,)"),
        ("from decimal import Decimal as D\nfrom fractions import Fraction\ndef f(): return D('0.1'), Fraction(1, 3)",
         "from decimal import Decimal\nfrom fractions import Fraction\nassert f() == (Decimal('0.1'), Fraction(1, 3))"),
        ("def f(x):\n    if x < 0: raise ValueError('negative')", "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'"),
        ("class Bad(ValueError): pass\ndef f(): raise Bad(3)", "try:\n    f()\n    assert False\nexcept Bad as e:\n    assert e.args == (3,) and isinstance(e, ValueError)"),
        ("class Stack:\n    size = 0\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return self\n    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n    def __str__(self): return f'<{len(self)}>'\n    def __eq__(self, o): return self.items == o.items",
         "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s[0] == 1 and s.pop() == 2 and s.items == [1]\nassert str(s) == '<1>' and s\nassert s == Stack().push(1) and s != Stack()\nassert isinstance(s, Stack) and not isinstance(3, Stack)\ns.size = 4\nassert s.size == 4\ntry:\n    s.pop(); s.pop()\n    assert False\nexcept IndexError: pass"),
        ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)", "assert (V(1) + V(2)).x == 3"),
        ("import math\nLIMIT = 10\nfrom math import gcd\ndef f(): return math.pi", "assert math.isclose(f(), 3.14159265) is False\nassert gcd(4, 6) == 2 and LIMIT == 10"),
        ("from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int", "assert P(1) < P(2) and P(1) == P(1) and repr(P(1)) == 'P(x=1)'"),
        ("from functools import cache\n@cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", "assert f(100) == 354224848179261915075"),
        ("import sys\ndef f(): return 1\nif __name__ == '__main__': print(input())\nsys.exit()", "assert f() == 1"),
        ("def f(): print('x' * 1000); return 1", "assert f() == 1"),
        ("from collections import deque\ndef f(d): d.append(len(d)); return d", "from collections import deque\nd = deque([1], 2)\nassert f(d) == deque([1, 1]) and d == deque([1, 1]) and f(d).maxlen == 2"),
        ("from collections import Counter\ndef f(c): c['b'] += 1; return Counter(dict(c.most_common(1)))", "from collections import Counter\nc = Counter('aa')\nassert f(c).most_common() == [('a', 2)] and c == Counter('aab')"),
        ("from collections import OrderedDict\ndef f(d): d.move_to_end(1); return d", "from collections import OrderedDict\nassert f(OrderedDict({1: 2, 3: 4})) == OrderedDict({3: 4, 1: 2})"),
        ("def f(r): return r[1:]", "assert f(range(0, 9, 3)) == range(3, 9, 3)"),
        ("def f(d): return d.keys(), d.items(), list(d.values())", "assert f({1: 2}) == ({1}, {(1, 2)}, [2])\nassert f({1: 2})[0] == {1: 3}.keys()"),
        ("def f(d): return d.values()", "assert list(f({1: 2})) == [2] and sum(f({1: 2})) == 2"),
        ("def f(x): return sum(x)", "d = {1: 2}\nassert [f(x) for x in (d, d.keys(), d.values(), map(int, '12'), (i for i in (1, 2)), iter([3]), zip())] == [1, 1, 2, 3, 3, 3, 0]"),
        ("def f(x): return next(x), list(x)", "import itertools\nassert f(itertools.chain('a', 'bc')) == ('a', ['b', 'c'])\nassert f(zip([1, 2], 'ab')) == ((1, 'a'), [(2, 'b')])"),
        ("def f(n, x): return [next(x) for _ in range(n)]", "import itertools\ndef odd():\n    for i in itertools.count(): yield 2 * i + 1\nassert f(2, odd()) == [1, 3] and f(2, itertools.cycle('a')) == ['a', 'a']"),
        ("import datetime\ndef f(d, t): return d + t", "from datetime import date, datetime, timedelta, timezone\nassert f(date(2020, 2, 28), timedelta(2)) == date(2020, 3, 1)\n"
         "assert f(datetime(2020, 1, 1, 0, 0, 0, 5), timedelta(-1, 2, 3)) == datetime(2019, 12, 31, 0, 0, 2, 8)\nnow = datetime(2020, 1, 1, tzinfo=timezone.utc)\nassert f(now, timedelta()) == now"),
        ("import datetime as d\ndef f(t): return d.timedelta(hours=t.hour), t.replace(minute=30)", "import datetime\nassert f(datetime.time(7, 15)) == (datetime.timedelta(hours=7), datetime.time(7, 30))"),
        ("def sum(a, b): return a * b", "def check(candidate):\n    assert candidate(2, 3) == 6"),
    ],
)  # fmt: skip
def test_tests_can_use_a_program_as_if_it_were_imported(program, tests):
    assert score(program, tests, "sum" if "def sum" in program else "") == 1.0


# --- programs that want to be right without being right ---------------------------------------------------------------

EQUAL = """
class Yes:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda self, *other: True
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = lambda self, other: other
    __abs__ = __round__ = __iter__ = __next__ = __pos__ = __neg__ = lambda self, *a: self
    __hash__ = lambda self: hash(42)
    __class__ = property(lambda self: int)
def f(x): return Yes()
"""
FORGERIES = {
    "equal to everything": EQUAL,
    "equal, as an int": "class Yes(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n    __ne__ = lambda *a: False\ndef f(x): return Yes()",
    "equal, as a class": EQUAL.replace("def f(x): return Yes()", "class f(Yes):\n    def __init__(self, x): pass"),
    "leaves": "import os\ndef f(x): os._exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "exits": "import sys\ndef f(x): sys.exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "raises KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "raises GeneratorExit": "def f(x): raise GeneratorExit",
    "raises ImportError": "def f(x): raise ImportError('numpy')",
    "exits later": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "prints a verdict": "print('tests 1\\npass')\ndef f(x):\n    print('pass\\n' * 10, flush=True)",
    "writes verdicts everywhere": "import os\ndef f(x):\n    for i in range(100):\n        try: os.write(i, b'pass\\n')\n        except OSError: pass",
    "patches builtins": "import builtins\nbuiltins.AssertionError = type('No', (Exception,), {})\nbuiltins.abs = builtins.round = lambda *a: 42\nbuiltins.all = lambda a: True\ndef f(x): return 0",
    "patches asserts away": "import ast, dis, sys\nast.Assert = ast.Pass\nsys.flags\ndef f(x): return 0\ndef abs(x): return 0\ndef round(*x): return 42\ndef all(x): return True",
    "patches the checker": "import sys\nm = sys.modules['__main__']\nm.Wire.send = lambda self, message: None\nm.encode = lambda v, keep: 42\nm.TestsEnd = None\ndef f(x): return 0",
    "patches JSON": "import json\njson.dumps = lambda *a, **k: '[\"value\", true, {}]'\ndef f(x): return 0",
    "patches math": "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
    "is its own math": "class math:\n    isclose = lambda *a, **k: True\ndef f(x): return 0",
    "answers nonsense": "import os\nos.write(3, b'\\0\\0\\0\\2{}')\ndef f(x): return 0",
    "answers too much": "import os\nos.write(3, b'\\xff\\xff\\xff\\xff')\ndef f(x): return 0",
    "answers for an exception": "import os, json\ndef f(x):\n    for k in ('SystemExit', 'BaseException', 'KeyboardInterrupt'):\n        m = json.dumps(['raised', [k], ['list', []]]).encode()\n        os.write(3, len(m).to_bytes(4, 'big') + m)",
    "answers with a callable": "import os, json\ndef f(x):\n    m = json.dumps(['value', ['remote', 'os'], {}]).encode()\n    os.write(3, len(m).to_bytes(4, 'big') + m)",
    "kills its parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)",
    "hangs after the answer": "import threading\ndef f(x): return 0\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()",
    "answers with an iterator": "import os, json\ndef f(x):\n    m = json.dumps(['value', ['iterator', [42]], {}]).encode()\n    os.write(3, len(m).to_bytes(4, 'big') + m)",
    "recurses": "def f(x): return f(x)",
    "returns a deep list": "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "returns itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "does not compile": "def f(x) return 42",
    "is not there": "",
}  # fmt: skip
CHECKS = [
    "assert f(1) == 42",
    "assert abs(f(1) - 42) < 1e-6",
    "assert f(1) in (42, 43)",
    "assert round(f(1), 2) == 42",
    "assert not f(1) != 42",
    "assert isinstance(f(1), int) and 41 < f(1) < 43",
    "assert math.isclose(f(1), 42)",
    "assert 42 in [f(1)]",
    "assert {f(1): 1}[42] == 1",
    "assert all(a == b for a, b in zip([f(1)], [42], strict=True))",
]


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_answer_scores_0(forgery):
    assert score(FORGERIES[forgery], CHECKS, share=True, timeout_s=1) == 0.0
    honest = "def f(x): return 42"
    if forgery == "is not there":
        assert score(honest, CHECKS, share=True) == 1.0


@pytest.mark.parametrize(
    "forgery", [f for f in FORGERIES if f.split()[0] in ("equal", "leaves", "answers", "recurses", "is")]
)
def test_a_forged_call_scores_0(forgery):
    tests = {"inputs": [[1]], "outputs": [42], "fn_name": "f"}
    assert score(FORGERIES[forgery], tests, timeout_s=1) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "print(3)\nimport time; time.sleep(100)",
        "print(3, flush=True)\nwhile True: pass",
        "print(3, flush=True)\nimport os; os._exit(1)",
        "print(3)\nraise SystemExit(1)",
        "print(3, flush=True)\nimport os; os.kill(os.getpid(), 9)",
        "import sys; sys.stderr.write('3'); print(end='')",
        "print(3)\nwhile True: print('spam' * 1000)",
        "x = bytearray(10 << 30); print(3)",
        "import os\nprint(os.listdir('/proc'), 3)",
    ],
)
def test_output_counts_only_if_the_program_ends_well(program):
    assert score(program, {"inputs": [""], "outputs": ["3"]}, timeout_s=1) == 0.0


def test_the_programs_process_does_not_contain_the_tests():
    search = """
import gc, os, sys
def everything():
    found, todo = {}, [sys.modules, *gc.get_objects()]
    frame = sys._getframe()
    while frame:
        todo += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    for each in todo:
        for o in [each, *gc.get_referents(each)]:
            if isinstance(o, (str, bytes)):
                found[id(o)] = o
    for folder, _, files in os.walk("/tmp"):
        found[folder] = files
    return repr([sys.argv, sys.orig_argv, dict(os.environ), list(found.values())])
def f(x):
    return everything()
"""
    tests = "assert 'needle'[::-1] not in f(1)\nassert 'eldeen' not in f(1)\nassert 'everything' in f(1)"
    assert score(search, tests, memory_mb=2048, timeout_s=20) == 1.0


def test_a_program_that_hangs_takes_its_time_limit_only():
    begin = time.monotonic()
    tests = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    assert score("while True: pass", tests, timeout_s=0.5, share=True) == 0.0
    assert (
        score("def add(a, b):\n    while True: pass", ["assert add(1, 2) == 3"] * 50, timeout_s=0.5, share=True) == 0.0
    )
    assert time.monotonic() - begin < 5


# --- what is not the program's doing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        (None, "must be Python"),
        ("", "must be Python"),
        ([], "must be Python"),
        ({}, "must be Python"),
        ({"inputs": ["1"], "outputs": []}, "as many outputs"),
        ([{"input": "1"}], "no output"),
        ("assert f(1) ==", "not Python: invalid syntax"),
        (["import no_such_module\nassert f(1)"], "no_such_module, which the sandbox does not have"),
        ("x = 3", "test nothing"),
        ("def check(candidate):\n    assert candidate(1)", "entry_point"),
    ],
)
def test_a_row_without_usable_tests_fails_instead_of_scoring(tests, problem):
    with pytest.raises(ValueError, match=problem):
        score("def f(x): return x", tests)


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("assert f(lambda x: x)", "a function of the tests"),
        ("assert f([len])", "a builtin_function_or_method of the tests"),
        ("class Node: pass\nassert f(x=Node())", "a Node of the tests"),
        ("import re\nassert f(re.compile('a'))", "a Pattern of the tests"),
        (
            "try:\n    f(print)\nexcept BaseException:\n    pass\nassert f(1)",
            "a builtin_function_or_method of the tests",
        ),
        ("from operator import add\nassert f(add)", "a builtin_function_or_method of the tests"),
    ],
)
def test_tests_that_send_an_object_of_their_own_are_a_failure(tests, problem):
    with pytest.raises(ValueError, match=f"{problem} cannot be given to the program"):
        score("from operator import add\ndef f(x): return x", tests)
    assert score("def f(x): return x", ["assert f(0)", tests]) == 0.0, "it is wrong before they do"


@pytest.mark.parametrize(
    "program",
    [
        "from queue import Queue\ndef f(x): return x",
        "class Queue:\n    __new__ = lambda c: range(10**9)\ndef f(x): return x",
        "class Queue(Exception): pass\ndef f(x): return x",
        "import os, json\ndef f(x): return x\nm = json.dumps({'Queue': ['stdlib', 'queue'], 'f': ['value', ['remote', "
        "1]]}).encode()\nos.write(3, len(m).to_bytes(4, 'big') + m)",
    ],
)  # fmt: skip
def test_a_program_cannot_turn_its_score_into_a_failure(program):
    assert score(program, "assert f(map(str, Queue())) == 1") == 0.0
    assert score(program, "assert f(Queue()) == 1") == 0.0


def test_without_a_sandbox_nothing_runs_unless_a_level_is_named(monkeypatch):
    for module in (runner, sandbox):
        monkeypatch.setattr(
            module, "why_unavailable", lambda level: "" if level is IsolationLevel.LIMITS else "not on this host"
        )
    runner._strongest_level.cache_clear()
    try:
        with pytest.raises(SandboxError, match="isolation: limits"):
            score(SUM, SUMS)
        with pytest.raises(ConfigError, match="not on this host"):
            prepare({})
        with pytest.raises(ConfigError, match="landlock does not work"):
            prepare({"isolation": "landlock"})
        prepare({"isolation": "limits"})
        assert "limits alone" in isolation_note()
        assert score(SUM, SUMS, isolation="limits") == 1.0
    finally:
        runner._strongest_level.cache_clear()


def test_options_are_checked_before_anything_is_tried():
    check_code({"timeout_s": 3, "isolation": "namespaces", "share": True})
    with pytest.raises(ConfigError, match="isolation is 'none'; it is one of strongest, namespaces"):
        check_code({"isolation": "none"})
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        check_code({"timeout_s": 0})


def test_what_both_ends_run_is_parsed_in_one_thread(monkeypatch):
    threads, parse = set(), ast.parse
    monkeypatch.setattr(ast, "parse", lambda *args, **more: threads.add(threading.get_ident()) or parse(*args, **more))
    compile_calls.cache_clear()
    assert score(ADD, ["assert add(1, 2) == 3"]) == 1.0
    assert threads == {threading.get_ident()}


def test_many_programs_are_judged_at_the_same_time():
    async def all_of_them() -> list[float]:
        each = [asyncio.to_thread(score, ADD, [f"assert add({i}, 1) == {i + i % 2}"]) for i in range(4)]
        return await asyncio.gather(*each)

    assert asyncio.run(all_of_them()) == [0.0, 1.0, 0.0, 1.0]


def test_a_program_cannot_read_the_answer_from_a_file(tmp_path):
    file = Path(tmp_path / "answer")
    file.write_text("3")
    assert score(f"print(open({str(file)!r}).read())", {"inputs": [""], "outputs": ["3"]}) == 0.0


def test_the_tests_may_be_the_rows_answer():
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    assert code(program, answer="def check(f):\n    assert f(1, 2) == 3", entry_point="add") == 1.0
    assert code(program, answer=["assert add(1, 2) == 4"]) == 0.0
    with pytest.raises(ValueError, match="the row's tests are 'None'"):
        code(program)


def test_many_quick_tests_do_not_use_up_the_time_of_a_program():
    program = "```python\nprint(int(input()) + 1)\n```"
    pairs = {"inputs": [str(i) for i in range(20)], "outputs": [str(i + 1) for i in range(20)]}
    began = time.monotonic()
    assert code(program, pairs, timeout_s=60.0) == 1.0
    taken = time.monotonic() - began  # most of it to start sandboxes, which does not count
    assert 1.0 in (code(program, pairs, timeout_s=0.7 * taken) for _ in range(3))  # the machine may be busy


BUSY = "import time\ndef work(seconds):\n    while time.process_time() < seconds: pass\n"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (f"{BUSY}work(0.4)\n{SUM}", {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}),
        (f"{BUSY}def add(a, b):\n    work(1)\n    return a + b", ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]),
    ],
    ids=["inputs", "calls"],
)
@pytest.mark.long
def test_on_an_overloaded_machine_a_right_program_never_scores_0(program, tests):
    def outcome(_: int) -> float | str:
        try:
            return score(program, tests, timeout_s=3.0)
        except SandboxError as error:
            return "not judged" if "overloaded" in str(error) else str(error)

    with one_processor(), ThreadPoolExecutor(20) as threads:
        outcomes = set(threads.map(outcome, range(20)))
    assert outcomes <= {"not judged", 1.0}
    assert "not judged" in outcomes, "the processor was not overloaded"


def test_a_program_that_keeps_itself_waiting_is_not_excused() -> None:
    waited = ProgramResult(False, "timeout", None, "", "", seconds=2.0, cpu_seconds=0.4, waited_seconds=1.5)
    with pytest.raises(SandboxError, match=r"waited 1\.5 of its 2\.0 s for a processor"):
        require_processor(2.0, [waited])
    require_processor(2.0, [replace(waited, cpu_seconds=1.6)])  # with other threads and processes of its own
    require_processor(2.0, [replace(waited, waited_seconds=0.4)])  # it slept
