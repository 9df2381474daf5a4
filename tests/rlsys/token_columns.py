"""Random per-token numbers of ragged sequences, for tests of losses, advantages, corrections and values."""

from hypothesis import strategies as st

# Sixteenths and their differences are exact in single precision: no ratio is within rounding error of a bound.
LOGPROBS = st.integers(-80, 0).map(lambda n: n / 16)
EIGHTHS = st.integers(-24, 24).map(lambda n: n / 8)
TOKEN = st.tuples(LOGPROBS, LOGPROBS, EIGHTHS, st.integers(1, 8).map(lambda n: n / 8))
# Sequences by id and length; ids are unordered, have gaps and may be negative.
LENGTHS = st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 5)), max_size=5, unique_by=lambda pair: pair[0])


@st.composite
def draw_columns(draw: st.DrawFn) -> list[list[float]]:
    """Log-probs, old log-probs, advantages, weights and sequences, [T] each."""
    sequences = [label for label, length in draw(LENGTHS) for _ in range(length)]
    rows = draw(st.lists(TOKEN, min_size=len(sequences), max_size=len(sequences)))
    return [[row[i] for row in rows] for i in range(4)] + [sequences]
