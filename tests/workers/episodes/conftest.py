import pytest

from rlsys.tasks.builtin import TINY_MODELS


@pytest.fixture(scope="session")
def tiny_model() -> str:
    return str(TINY_MODELS["builtin:tiny"].folder(0, lambda _: None))
