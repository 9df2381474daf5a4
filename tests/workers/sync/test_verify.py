"""How differences between the weights of an engine and the policy's are named."""

from workers.sync.verify import describe_differences


def test_a_missing_and_an_unknown_tensor_are_named() -> None:
    fingerprints = {"a": "1", "b": "2"}
    assert describe_differences(fingerprints, fingerprints) == ""
    assert describe_differences(fingerprints, {"a": "1"}) == "1 of 2 tensors are missing: b"
    assert describe_differences({"a": "1"}, fingerprints) == "1 were never sent: b"
    many = {str(i): "0" for i in range(9)}
    assert describe_differences(many, {}) == "9 of 9 tensors are missing: 0, 1, 2, 3 and 5 more"
