"""Cuts Python tests, as data sets have them, into pieces that pass or fail each on its own. Nothing is run here."""

import ast
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class PythonTests:
    """Tests in the order in which they run.

    `Plan(pieces=[("x = f(1)", False), ("assert x == 2", True)], names={"x", "f"}, modules=set())`
    """

    pieces: list[tuple[str, bool]]  # code, and whether it is a test; the rest is what tests need
    names: set[str]  # that occur, and may be the program's
    modules: set[str]  # of the standard library that occur, imported or not

    @property
    def test_count(self) -> int:
        return sum(is_test for _, is_test in self.pieces)


def split_tests(tests: str | list[str], entry_point: str) -> PythonTests:
    """One text is cut into its statements; in a list, each text is one test.

    Called besides are what nobody calls: `check`, with the entry point, functions `test…`, and the methods of a `TestCase`.
    """
    bodies = [drop_main_guard(parse_tests(text).body) for text in ([tests] if isinstance(tests, str) else tests)]
    whole = [statement for body in bodies for statement in body]
    for module in (m for s in whole for m in imported_modules(s)):
        if module not in sys.stdlib_module_names:
            raise ValueError(f"code: the row's tests import {module}, which the sandbox does not have.")
    cut = [[statement] for statement in whole] if isinstance(tests, str) else bodies
    pieces = [(ast.unparse(ast.Module(body, [])), any(map(is_test, body))) for body in cut]
    called = {n.func.id for s in whole for n in calls_made(s) if isinstance(n.func, ast.Name)}
    for statement in whole:
        if isinstance(statement, ast.FunctionDef) and statement.name not in called:
            if statement.name == "check" and entry_point:
                pieces.append(("check(candidate)", True))
            elif statement.name.startswith("test") and not statement.args.args:
                pieces.append((f"{statement.name}()", True))
        elif isinstance(statement, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in statement.bases):
            methods = [m.name for m in statement.body if isinstance(m, ast.FunctionDef) and m.name.startswith("test")]
            pieces += [(f"run_case({statement.name}, {method!r})", True) for method in methods]
    nodes = [n for statement in [*whole, *parse_tests(entry_point).body] for n in ast.walk(statement)]
    bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    own = {
        alias.asname or alias.name.partition(".")[0]
        for statement in whole
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names
    }
    return PythonTests(pieces, names - own, bases & sys.stdlib_module_names)


def parse_tests(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"code: the row's tests are no Python: {error}: {text[:200]!r}.") from error


def drop_main_guard(body: list[ast.stmt]) -> list[ast.stmt]:
    """Without `if __name__ == "__main__":`, which would not hold, and without the call of unittest's own runner."""
    found = []
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            found += [s for s in statement.body if "unittest.main" not in ast.unparse(s)]
        else:
            found.append(statement)
    return found


def imported_modules(statement: ast.stmt) -> list[str]:
    """Top-level names of the modules that a statement imports."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module:
        return [statement.module.partition(".")[0]]
    return []


def calls_made(statement: ast.stmt) -> list[ast.Call]:
    """The calls that a statement makes when it is run."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return []
    return [n for n in ast.walk(statement) if isinstance(n, ast.Call)]


def is_test(statement: ast.stmt) -> bool:
    """Whether a statement is there to fail: it asserts, or is nothing but a call."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return False
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and getattr(statement.value.func, "id", "") != "print"
    return any(isinstance(n, ast.Assert) for n in ast.walk(statement))
