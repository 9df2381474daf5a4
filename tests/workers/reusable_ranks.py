"""Ranks that can be started again in the same process with another configuration: a new process takes ten seconds."""

import hashlib
from typing import Any

from rlsys.config.schema import Config
from workers.learner.critic import CriticRank
from workers.learner.policy import PolicyRank
from workers.sync import layout


class Reusable:
    """A rank that can be started again: `set_config(config)`, then `start`. The ranks join each other only once."""

    config: Config
    joined = False

    def set_config(self, config: Config) -> None:
        self.config = config

    def join(self, address: str, port: int) -> None:
        if not self.joined:
            super().join(address, port)  # type: ignore[misc]
        self.joined = True


class ReusablePolicyRank(Reusable, PolicyRank):
    def set_bucket_bytes(self, size: int) -> None:
        """Applies from the next connection on."""
        layout.split_into_buckets.__defaults__ = (size,)

    def steepen(self, factor: float) -> None:
        """Multiplies the gradient below the last layer by this, from now on."""

        def hook(module: Any, inputs: Any, output: Any) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * factor)

        self.steepening = self.lm.get_decoder().norm.register_forward_hook(hook)

    def stop_steepening(self) -> None:
        self.steepening.remove()

    def digest(self) -> str:
        """Hashes the model's weights, their fp32 copies, and Adam's moments and step."""
        import torch

        from workers.learner.files.zero_state import MOMENTS, WEIGHT

        parameters = dict(self.lm.named_parameters())
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        tensors = [*self.zero.state.owned_tensors(trained, (WEIGHT, *MOMENTS)).values()]
        for parameter in parameters.values():
            with self.zero.gathered(parameter):
                tensors.append(parameter.detach().clone())
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


class ReusableCriticRank(Reusable, CriticRank):
    pass
