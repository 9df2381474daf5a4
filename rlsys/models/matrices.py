"""The linear layers below a model's output layer, by name: what a token passes, and what LoRA can adapt."""

from typing import NamedTuple


class Matrix(NamedTuple):
    """Linear layers that are alike. `Matrix("q_proj", 896, 896, layers=24)`"""

    name: str
    inputs: int
    outputs: int
    layers: int  # that have it

    @property
    def size(self) -> int:
        """Its elements in one layer."""
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Its elements in all layers."""
        return self.size * self.layers
