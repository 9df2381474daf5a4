"""How tensors are grouped into buckets."""

from workers.sync.layout import split_into_buckets


def test_buckets_keep_order_and_size_and_cut_no_tensor() -> None:
    counts = {"a": 16, "b": 16, "c": 100, "d": 16, "e": 1}
    buckets = split_into_buckets([(name, "float32", [count]) for name, count in counts.items()], limit=192)
    names = [[name for name, _, _ in bucket] for bucket in buckets]
    assert names == [["a", "b"], ["c"], ["d", "e"]]  # "c" alone is more than a bucket; "e" takes 64 bytes
