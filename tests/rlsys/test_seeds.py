import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rlsys.seeds import derive_seed


def test_a_seed_is_the_same_in_another_process():
    code = "from rlsys.seeds import derive_seed; print(derive_seed(0, 3, 'zigzag:17#0', 2))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == derive_seed(0, 3, "zigzag:17#0", 2)


@given(st.lists(st.one_of(st.integers(), st.text()), max_size=4))
def test_a_seed_fits_into_63_bits(parts):
    assert 0 <= derive_seed(*parts) < 2**63


def test_every_part_of_a_seed_counts_and_so_do_their_boundaries():
    parts = [
        (0, 1, "u", 2),
        (1, 1, "u", 2),
        (0, 2, "u", 2),
        (0, 1, "v", 2),
        (0, 1, "u", 3),
        (0, 1, "u2"),
        (0, 1, "u", "", 2),
    ]
    assert len({derive_seed(*p) for p in parts}) == len(parts)


def test_a_thousand_samples_have_a_thousand_seeds():
    assert len({derive_seed(0, step, "p", i) for step in range(10) for i in range(100)}) == 1000
