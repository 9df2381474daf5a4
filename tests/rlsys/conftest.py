import pytest
import torch
from hypothesis import settings

from rlsys.checks import load_checked
from rlsys.config.schema import Config
from rlsys.errors import ConfigError

torch.set_num_threads(1)
settings.register_profile("rlsys", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("rlsys")


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read(yaml, *overrides)` from a file `tmp_path/some.yaml`, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def read(text: str = "", *overrides: str) -> Config:
        (tmp_path / "some.yaml").write_text(text)
        return load_checked("some.yaml", overrides)

    return read


@pytest.fixture
def refused(read):
    """`refused(yaml, *overrides)` is the list of problems."""

    def refused(text: str = "", *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            read(text, *overrides)
        return error.value.problems

    return refused
