"""The fp32 state of a model under DeepSpeed, parameter by parameter: weights, Adam's two moments, and its step.

DeepSpeed keeps it in tensors of its own:
    ZeRO 0      a tensor per parameter, whole on every rank; in bfloat16 an fp32 copy beside it
    ZeRO 1, 2   all parameters end to end in one flat tensor, cut evenly: a parameter may lie across a cut
    ZeRO 3      every parameter cut evenly, the last piece padded; the pieces of a rank end to end in flat tensors
What is saved knows nothing of that, so any stage and any number of ranks can load what another wrote.
"""

from dataclasses import dataclass
from typing import Any

from workers.learner.tensor_files import TensorFiles

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a parameter: elements [start, start + count) of the whole are [offset, …) of `flat`."""

    flat: Any  # the key of Adam's state
    offset: int
    start: int
    count: int


class ZeroState:
    """Both methods are collectives. `named` are the model's parameters by the names they are saved under."""

    def __init__(self, engine: Any, stage: int, comm: Any):
        self.engine, self.stage, self.comm = engine, stage, comm
        self.optimizer, self.adam = engine.optimizer, engine.basic_optimizer
        self.masters: dict[Any, Any] = {}
        if stage == 0:
            working = list(engine.module.parameters())
            # In bfloat16 DeepSpeed's optimizer is one around Adam.
            of_fp32 = self.optimizer is self.adam
            pairs = [(working, working)] if of_fp32 else zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups)  # noqa: B905
            self.masters = {p: master for low, high in pairs for p, master in zip(low, high, strict=True)}
        self.adam.create_moments(self.flat_tensors())

    def flat_tensors(self) -> list[Any]:
        """The tensors Adam works on."""
        if self.stage == 0:
            return list(self.masters.values())
        if self.stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    def local_piece(self, parameter: Any) -> Piece:
        if self.stage == 0:
            return Piece(self.masters[parameter], 0, 0, parameter.numel())
        if self.stage == 3:
            group, offset, size = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            start = min(size * self.comm.get_rank(), parameter.ds_numel)
            count = min(size, parameter.ds_numel - start)
            return Piece(self.optimizer.fp32_partitioned_groups_flat[group], offset, start, count)
        mapping = parameter._hp_mapping
        if mapping is None:
            return Piece(self.flat_tensors()[0], 0, 0, 0)
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(self.flat_tensors()[mapping.param_group_index], here.start, there.start, here.numel)

    def piece_data(self, piece: Piece, kind: str) -> Any:
        """The piece's weights or one of its moments, to read or to write."""
        flat = piece.flat if kind == WEIGHT else self.adam.state[piece.flat][kind]
        return flat.detach().view(-1).narrow(0, piece.offset, piece.count)

    def owned_tensors(self, named: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
        """Copies in host memory of the whole tensors of every n-th parameter, for n ranks; Adam's step with the first's."""
        rank, ranks = self.comm.get_rank(), self.comm.get_world_size()
        found = {} if rank else {"step": self.adam.state[self.flat_tensors()[0]]["step"].clone()}
        for i, (name, parameter) in enumerate(named.items()):
            for kind in kinds:
                whole = self.gather_tensor(parameter, kind, i % ranks)
                if i % ranks == rank:
                    found[f"{kind}/{name}"] = whole.cpu()
        return found

    def gather_tensor(self, parameter: Any, kind: str, owner: int) -> Any:
        """The whole tensor on its owner, a copy; on the other ranks something without meaning."""
        import torch

        piece, shape = self.local_piece(parameter), getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), device=self.engine.device)
        whole.narrow(0, piece.start, piece.count).copy_(self.piece_data(piece, kind))
        if self.stage:
            # Each element is there once. Added as integers, because -0.0 + 0.0 would be 0.0.
            self.comm.reduce(whole.view(torch.int32), dst=owner)
        return whole.view(shape)

    def restore(self, named: dict[str, Any], parts: TensorFiles, weights: TensorFiles | None) -> None:
        """The inverse of `share`, from all ranks' parts. Where `weights` is given, they are there, under the bare names."""
        import torch

        shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in named.items()}
        kinds = MOMENTS if weights else (WEIGHT, *MOMENTS)
        expected = {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
        parts.require(expected | {"step": []})
        if weights:
            weights.require(shapes)
        for name, parameter in named.items():
            piece = self.local_piece(parameter)
            for kind in (WEIGHT, *MOMENTS) if piece.count else ():
                whole = weights.read(name) if weights and kind == WEIGHT else parts.read(f"{kind}/{name}")
                self.piece_data(piece, kind).copy_(whole.view(-1).narrow(0, piece.start, piece.count))
        step = parts.read("step")
        for flat in self.flat_tensors():
            self.adam.state[flat]["step"].copy_(step)
        with torch.no_grad():
            self.refresh_model_weights()

    def refresh_model_weights(self) -> None:
        """Brings the weights the model works with to the fp32 ones."""
        if self.stage == 0:
            for parameter, master in self.masters.items():
                parameter.copy_(master)
        elif self.stage == 3:
            self.optimizer.checkpoint_event_prologue()
            both = zip(self.optimizer.fp16_partitioned_groups_flat, self.flat_tensors(), strict=True)
            for working, flat in both:
                working.copy_(flat)
            self.optimizer.checkpoint_event_epilogue()
        else:
            self.optimizer.update_lp_params()
