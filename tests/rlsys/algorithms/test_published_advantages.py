"""Our advantages against those of other libraries, on one ragged batch. `make published` computes theirs again."""

from typing import Any

import pytest
from test_advantages import Samples, ours

SAMPLES = Samples([1, 0, 0.5, 0, 2, 1], [0, 0, 0, 1, 1, 1], [1, 4, 2, 7, 3, 5], [0] * 6, [0, 1, 1, 0, 1, 0])
WEIGHTS = [1.0, 0.5]  # of the two components for GDPO
# their function → our estimator with its options, and their advantages
PUBLISHED: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "verl reinforce_plus_plus": ("reinforce_pp", {}, [0.56997, -0.823291, -0.12666, -0.823291, 1.963232, 0.56997]),
    "OpenRLHF reinforce": (
        "reinforce_pp population",
        {},
        [0.583383, -0.842665, -0.129641, -0.842665, 2.009431, 0.583383],
    ),
    "OpenRLHF reinforce no_std_norm": (
        "reinforce_pp none",
        {},
        [0.409091, -0.590909, -0.090909, -0.590909, 1.409091, 0.409091],
    ),
    "verl reinforce_plus_plus_baseline": (
        "reinforce_pp_baseline",
        {},
        [1.09371, -0.36457, 0.36457, -1.09371, 1.822851, 0.36457],
    ),
    "verl grpo_passk": ("grpo_passk", {}, [0.999998, 0.0, 0.0, 0.0, 0.999999, 0.0]),
    "TRL normalize_then_sum": (
        "gdpo",
        {"weights": WEIGHTS, "eps": 1e-4},
        [0.422565, -0.711201, 0.288636, -1.288573, 1.577209, -0.288636],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_ragged_batch_has_the_advantages_that_other_libraries_publish(name: str) -> None:
    case, options, expected = PUBLISHED[name]
    assert ours(case, SAMPLES, **options).tolist() == pytest.approx(expected, abs=5e-6)
