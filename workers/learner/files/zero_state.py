"""The fp32 state of a model under DeepSpeed, parameter by parameter: weights, Adam's two moments, and Adam's step.

DeepSpeed keeps the state in tensors of its own:
    ZeRO 0      one tensor per parameter, whole on every rank; in bfloat16 also an fp32 copy
    ZeRO 1, 2   all parameters end to end in one flat tensor, cut evenly: a parameter may lie across a cut
    ZeRO 3      every parameter cut evenly, the last piece padded; the pieces of a rank end to end in flat tensors
The saved state is independent of that: any stage and any number of ranks can load what another one wrote.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

from workers.learner.files.tensor_files import TensorFiles

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a parameter: its elements [start, start + count) are elements [offset, …) of `flat`."""

    flat: Any  # a tensor that Adam works on, and the key of its moments
    offset: int
    start: int
    count: int


class ZeroState:
    """Saves and restores the state. Both are collectives. `parameters`: those that are trained, by name."""

    def __init__(self, engine: Any, stage: int, comm: Any):
        self.engine, self.stage, self.comm = engine, stage, comm
        self.rank, self.ranks = comm.get_rank(), comm.get_world_size()
        self.optimizer, self.adam = engine.optimizer, engine.basic_optimizer
        self.masters: dict[Any, Any] = {}  # with ZeRO 0: the fp32 tensor of each parameter
        if stage == 0:
            working = [p for p in engine.module.parameters() if p.requires_grad]
            # In bfloat16, DeepSpeed's optimizer wraps Adam.
            fp32 = self.optimizer is self.adam
            low = [working] if fp32 else self.optimizer.fp16_groups
            high = [working] if fp32 else self.optimizer.fp32_groups
            self.masters = dict(zip(chain(*low), chain(*high), strict=True))
        self.adam.create_moments(self.flat_tensors())

    def flat_tensors(self) -> list[Any]:
        """Returns the tensors that Adam works on."""
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
            start = min(size * self.rank, parameter.ds_numel)
            count = min(size, parameter.ds_numel - start)
            return Piece(self.optimizer.fp32_partitioned_groups_flat[group], offset, start, count)
        mapping = parameter._hp_mapping
        if mapping is None:  # this rank holds none of it
            return Piece(self.flat_tensors()[0], 0, 0, 0)
        flat, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(self.flat_tensors()[mapping.param_group_index], flat.start, whole.start, flat.numel)

    def piece_data(self, piece: Piece, kind: str) -> Any:
        """Returns a view of the piece's weights or of one of its moments."""
        flat = piece.flat if kind == WEIGHT else self.adam.state[piece.flat][kind]
        return flat.detach().view(-1).narrow(0, piece.offset, piece.count)

    def shard_file(self) -> str:
        """Returns the name of the file with this rank's share of the state."""
        return f"part-{self.rank:05}-of-{self.ranks:05}.safetensors"

    # --- save ---------------------------------------------------------------------------------------------------------

    def owned_tensors(self, parameters: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
        """Copies whole tensors to host memory. Of n ranks, each owns every n-th parameter; rank 0 also Adam's step."""
        owned = {} if self.rank else {"step": self.adam.state[self.flat_tensors()[0]]["step"].cpu().clone()}
        for i, (name, parameter) in enumerate(parameters.items()):
            for kind in kinds:
                whole = self.gather_tensor(parameter, kind, i % self.ranks)
                if i % self.ranks == self.rank:
                    owned[f"{kind}/{name}"] = whole.cpu()
        return owned

    def gather_tensor(self, parameter: Any, kind: str, owner: int) -> Any:
        """Returns a copy of the whole tensor on its owner. On the other ranks the result has no meaning."""
        import torch

        piece, shape = self.local_piece(parameter), getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), device=self.engine.device)
        whole.narrow(0, piece.start, piece.count).copy_(self.piece_data(piece, kind))
        if self.stage:
            # One rank has each element, the others have zero. Added as integers, because -0.0 + 0.0 would be 0.0.
            self.comm.reduce(whole.view(torch.int32), dst=owner)
        return whole.view(shape)

    # --- restore ------------------------------------------------------------------------------------------------------

    def restore(self, parameters: dict[str, Any], files: TensorFiles, weights: TensorFiles | None) -> None:
        """Loads the tensors that all ranks saved. `weights`: files with the weights, if the others do not have them."""
        import torch

        self.require_all(parameters, files, weights)
        for name, parameter in parameters.items():
            piece = self.local_piece(parameter)
            for kind in (WEIGHT, *MOMENTS) if piece.count else ():
                # Of the whole tensor, only this rank's piece is read from disk.
                whole = weights.read(name) if weights and kind == WEIGHT else files.read(f"{kind}/{name}")
                self.piece_data(piece, kind).copy_(whole.view(-1).narrow(0, piece.start, piece.count))
        step = files.read("step")
        for flat in self.flat_tensors():
            self.adam.state[flat]["step"].copy_(step)
        with torch.no_grad():
            self.refresh_model_weights()

    def require_all(self, parameters: dict[str, Any], files: TensorFiles, weights: TensorFiles | None) -> None:
        """Raises unless the files hold exactly the tensors that are needed."""
        shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
        kinds = MOMENTS if weights else (WEIGHT, *MOMENTS)
        expected = {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
        files.require(expected | {"step": []})
        if weights:
            weights.require(shapes)

    def refresh_model_weights(self) -> None:
        """Copies the fp32 weights to those that the model computes with."""
        if self.stage == 0:
            for parameter, master in self.masters.items():
                parameter.copy_(master)
        elif self.stage == 3:
            self.optimizer.checkpoint_event_prologue()
            for working, flat in zip(self.optimizer.fp16_partitioned_groups_flat, self.flat_tensors(), strict=True):
                working.copy_(flat)
            self.optimizer.checkpoint_event_epilogue()
        else:
            self.optimizer.update_lp_params()
