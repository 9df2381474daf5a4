"""Ranks that take a new configuration in the same process, because a process takes ten seconds to come up."""

import hashlib
from typing import Any

from rlsys.config.schema import Config
from workers.learner.critic import CriticRank
from workers.learner.policy import PolicyRank
from workers.sync import host_memory


class Again:
    """`become(config)`, then the rank's own `start`, as often as one likes; the ranks meet once."""

    config: Config
    met = False

    def become(self, config: Config) -> None:
        self.config = config

    def start(self, *arguments: Any) -> None:
        if self.met:
            from workers.learner import zero

            zero.join_process_group = lambda *_: None
        self.met = True
        super().start(*arguments)  # type: ignore[misc]


class PolicyAgain(Again, PolicyRank):
    def in_buckets_of(self, size: int) -> None:
        """From the next invitation on."""
        host_memory.split_into_buckets.__defaults__ = (size,)

    def steepen(self, factor: float) -> None:
        """From now on the gradient below the last layer is multiplied by this."""

        def steeper(module: Any, given: Any, answer: Any) -> None:
            if answer.requires_grad:
                answer.register_hook(lambda gradient: gradient * factor)

        self.steep = self.lm.get_decoder().norm.register_forward_hook(steeper)

    def flatten(self) -> None:
        """No more."""
        self.steep.remove()

    def digest(self) -> str:
        """Of everything: the weights the model works with, the fp32 ones, Adam's moments and step."""
        import torch

        from workers.learner.zero_state import MOMENTS, WEIGHT

        named = dict(self.lm.named_parameters())
        found = [*self.zero.state.owned_tensors(named, (WEIGHT, *MOMENTS)).values()]
        for parameter in named.values():
            with self.zero.gathered(parameter):
                found.append(parameter.detach().clone())
        bits = hashlib.sha256()
        for whole in found:
            bits.update(whole.contiguous().view(-1).view(torch.uint8).numpy())
        return bits.hexdigest()


class CriticAgain(Again, CriticRank):
    pass
