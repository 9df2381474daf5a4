import pytest

from launch.tools.estimates.devices import GPUS, find_gpu, parse_cluster
from rlsys.errors import ConfigError


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("A100", "A100-40"),
        ("A100-40G", "A100-40"),
        ("NVIDIA L40", "L40"),
        ("GeForce-RTX-3090", "RTX3090"),
        ("RTX-A6000", "A6000"),
    ],
)
def test_a_gpu_is_found_by_part_of_its_driver_name(driver, name):
    assert find_gpu(driver) == GPUS[name]


def test_an_unlisted_device_is_not_guessed():
    for other in ("Some Card", "NVIDIA GH200 480GB", "NVIDIA RTX 6000 Ada Generation", "A800 40GB Active"):
        assert find_gpu(other) is None


def test_a_cluster_is_split_into_nodes():
    assert [(n.gpus, n.gpu.name) for n in parse_cluster("8xH100")] == [(8, "H100")]
    assert [(n.gpus, n.gpu.name) for n in parse_cluster("2x8xA100-80")] == [(8, "A100-80")] * 2
    assert [n.gpus for n in parse_cluster("20xa100")] == [8, 8, 4]
    assert [n.gpus for n in parse_cluster("L4")] == [1]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xrtx4090", "RTX4090"),
        ("8x4090", "RTX4090"),
        ("8 x RTX 4090", "RTX4090"),
        ("8XH100", "H100"),
        ("8×H100-80GB", "H100"),
        ("8xA100-80GB", "A100-80"),
        ("8xA100-40gb", "A100-40"),
        ("8xA100", "A100-80"),
        ("8*H100", "H100"),
        ("8 H100", "H100"),
        ("8 x H100 80GB", "H100"),
        ("8 NVIDIA H100 80GB HBM3", "H100"),
        ("H100:8", "H100"),
        ("A100-80GB:8", "A100-80"),
        ("H100 x8", "H100"),
        ("H100x8", "H100"),
        ("A10Gx8", "A10G"),
        ("RTX4090 x 8", "RTX4090"),
        ("RTX 4090:8", "RTX4090"),
        ("8 A100", "A100-80"),
        ("8x NVIDIA A100", "A100-80"),
    ],
)
def test_a_kind_of_gpu_is_found_by_its_usual_names(text, name):
    assert [(n.gpus, n.gpu.name) for n in parse_cluster(text)] == [(8, name)]


@pytest.mark.parametrize("text", ["RTX 4090", "NVIDIA A100-SXM4-80GB", "L4 24GB", "H100"])
def test_a_kind_alone_is_one_gpu(text):
    assert [n.gpus for n in parse_cluster(text)] == [1]


@pytest.mark.parametrize(
    "text",
    [
        *("8xH1000", "0xH100", "2x2x2xH100", "eightxH100", "8xH100-40GB", "", "H100:0", "8xH100:8", "8xH100x2"),
        *("8 fast H100", "H100, H200", "H100 8", "L4 32", "-8xH100", "4xH100+4xA100", "8x", "x8", "8"),
    ],
)
def test_wrong_cluster_text_is_refused_with_examples(text):
    with pytest.raises(ConfigError, match=r"--cluster.* as in 8xH100, 8 H100 or H100:8, or NODES x GPUS x KIND"):
        parse_cluster(text)
