"""Groups of ranks that share sequences: see `rlsys.forward.sequence_parallel`."""

from datetime import timedelta
from functools import partial

from rlsys.forward.sequence_parallel import SequenceGroup


def create_sequence_group(ranks: int, timeout: timedelta) -> SequenceGroup:
    """Returns the group of this rank. Each `ranks` ranks in a row are one. All ranks of the model take part."""
    import torch.distributed as dist
    from deepspeed.sequence.layer import _dim_zero_all_to_all, register_all_to_all_group

    group, _ = dist.new_subgroups(ranks, timeout=timeout)
    register_all_to_all_group(group)
    return SequenceGroup(
        dist.get_rank(group), ranks, partial(_dim_zero_all_to_all, group), partial(dist.all_reduce, group=group)
    )
