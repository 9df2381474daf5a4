"""Defaults that are others on GPUs."""

from rlsys.checks import check
from rlsys.config import loading
from rlsys.config.schema import Config

GPU = "cluster.device=gpu"


def test_they_apply_to_gpus_alone_and_any_value_replaces_them(read):
    def chosen(*overrides, text=""):
        c = read(text, *overrides)
        return c.policy.dtype, c.rollout.dtype, c.rollout.max_sequences

    assert chosen() == ("float32", "float32", 256)
    assert chosen(GPU) == chosen(text="cluster: {device: gpu}") == ("bfloat16", "bfloat16", 1024)
    assert chosen(GPU, "policy.dtype=float32", text="rollout: {max_sequences: 8}") == ("float32", "bfloat16", 8)
    assert chosen("cluster.device=cpu", text="cluster: {device: gpu}") == chosen()


def test_each_is_an_allowed_value_of_its_type_and_differs_from_that_on_cpu(read):
    on_cpu = loading.defaults()
    assert on_cpu == loading.flatten(Config())
    for key, value in loading.gpu_defaults().items():
        assert type(value) is type(on_cpu[key])
        assert value != on_cpu[key]
    assert loading.flatten(read("", GPU)) | {"run.dir": ""} == loading.defaults("gpu") | {"cluster.device": "gpu"}
    assert not check(read("", GPU), None)


def test_a_saved_configuration_keeps_its_values_on_another_device(read):
    saved = loading.to_yaml(read("", GPU))
    assert read(saved, "cluster.device=cpu").policy.dtype == "bfloat16"
