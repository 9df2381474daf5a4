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


def gated_mlp(family: str, hidden: int, width: int, layers: int) -> list[Matrix]:
    """The matrices of a gated MLP, under the names that the family gives them."""
    if family == "phi3":
        return [Matrix("gate_up_proj", hidden, 2 * width, layers), Matrix("down_proj", width, hidden, layers)]
    if family == "granitemoehybrid":
        return [Matrix("input_linear", hidden, 2 * width, layers), Matrix("output_linear", width, hidden, layers)]
    gate, up, down = ("w1", "w3", "w2") if family == "lfm2" else ("gate_proj", "up_proj", "down_proj")
    return [
        Matrix(gate, hidden, width, layers),
        Matrix(up, hidden, width, layers),
        Matrix(down, width, hidden, layers),
    ]
