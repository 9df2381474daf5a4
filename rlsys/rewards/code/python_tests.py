"""Splits Python tests, as data sets have them, into pieces that pass or fail each on its own. Nothing is run here."""

import ast
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class PythonTests:
    """Tests in the order in which they run.

    `PythonTests(pieces=[("x = f(1)", False), ("assert x == 2", True)], names={"x", "f"}, modules=set())`
    """

    pieces: list[tuple[str, bool]]  # code, and whether it is a test; the rest is what tests need
    names: set[str]  # that occur, and may be the program's
    modules: set[str]  # of the standard library that occur, imported or not

    @property
    def test_count(self) -> int:
        return sum(is_test for _, is_test in self.pieces)


def split_tests(tests: str | list[str], entry_point: str) -> PythonTests:
    """Splits one text into its statements; in a list, each text is one test.

    Calls are added for what the tests define and do not call: `check` with the entry point, functions `test…`, and
    methods of a `TestCase`.
    """
    bodies = [drop_main_guard(parse_tests(text).body) for text in ([tests] if isinstance(tests, str) else tests)]
    statements = [statement for body in bodies for statement in body]
    for module in (m for s in statements for m in imported_modules(s)):
        if module not in sys.stdlib_module_names:
            raise ValueError(f"code: the row's tests import {module}, which the sandbox does not have.")
    groups = [[statement] for statement in statements] if isinstance(tests, str) else bodies
    pieces = [(ast.unparse(ast.Module(body, [])), any(map(is_test, body))) for body in groups]
    pieces += [(call, True) for call in missing_calls(statements, entry_point)]
    nodes = [n for statement in [*statements, *parse_tests(entry_point).body] for n in ast.walk(statement)]
    bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    return PythonTests(pieces, names - imported_names(statements), bases & sys.stdlib_module_names)


def parse_tests(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"code: the row's tests are not Python: {error}: {text[:200]!r}.") from error


def drop_main_guard(body: list[ast.stmt]) -> list[ast.stmt]:
    """Unwraps `if __name__ == "__main__":`, which would be false, and drops the call of unittest's own runner."""
    statements = []
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            statements += [s for s in statement.body if "unittest.main" not in ast.unparse(s)]
        else:
            statements.append(statement)
    return statements


def imported_modules(statement: ast.stmt) -> list[str]:
    """The top-level names of the modules that a statement imports."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module:
        return [statement.module.partition(".")[0]]
    return []


def imported_names(statements: list[ast.stmt]) -> set[str]:
    """The names that imports bind."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for statement in statements
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names
    }


def missing_calls(statements: list[ast.stmt], entry_point: str) -> list[str]:
    """The calls of test functions that are defined and never called, as code."""
    called = {n.func.id for s in statements for n in calls_made(s) if isinstance(n.func, ast.Name)}
    calls = []
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name not in called:
            if statement.name == "check" and entry_point:
                calls.append("check(candidate)")
            elif statement.name.startswith("test") and not statement.args.args:
                calls.append(f"{statement.name}()")
        elif isinstance(statement, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in statement.bases):
            methods = [m.name for m in statement.body if isinstance(m, ast.FunctionDef) and m.name.startswith("test")]
            calls += [f"run_case({statement.name}, {method!r})" for method in methods]
    return calls


def calls_made(statement: ast.stmt) -> list[ast.Call]:
    """The calls that a statement makes when it is run."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return []
    return [n for n in ast.walk(statement) if isinstance(n, ast.Call)]


def is_test(statement: ast.stmt) -> bool:
    """True if a statement can fail by intent: it asserts, or is nothing but a call."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return False
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and getattr(statement.value.func, "id", "") != "print"
    return any(isinstance(n, ast.Assert) for n in ast.walk(statement))
