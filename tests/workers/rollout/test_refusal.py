import pytest
from pydantic import BaseModel, ValidationError

from rlsys.config.schema import ConfigError
from workers.rollout.refusal import refusing_model


class Settings(BaseModel):
    heads: int


def refused(error: Exception) -> str:
    with pytest.raises(ConfigError) as refusal, refusing_model("some/model"):
        raise error
    return str(refusal.value)


def test_an_exception_of_a_library_becomes_one_sentence_with_a_way_out():
    message = refused(ModuleNotFoundError("No module named 'torchvision'\nand more"))
    assert message.startswith("model.path: the engines cannot run some/model here: ModuleNotFoundError: No module")
    assert message.endswith("Use another model, or a machine on which vLLM runs it.")
    assert "\n" not in message


def test_a_validation_error_is_quoted_without_its_frame():
    with pytest.raises(ValidationError) as invalid:
        Settings(heads="many")  # type: ignore[arg-type]
    assert "Input should be a valid integer" in refused(invalid.value)
    assert "https" not in refused(invalid.value)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("cannot allocate memory"), RuntimeError("Engine core initialization failed")]
)
def test_a_machine_that_is_short_of_something_is_no_reason_to_refuse_a_model(error):
    with pytest.raises(type(error)), refusing_model("some/model"):
        raise error
