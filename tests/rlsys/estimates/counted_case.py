"""What `counted_update.py` counts, and `test_device_memory.py` estimates."""

from dataclasses import dataclass, replace

from rlsys.config.methods import EntropyConfig
from rlsys.config.schema import ClusterConfig, Config, PolicyConfig, RolloutConfig, TrainerConfig
from rlsys.estimates.memory import SequenceLengths
from rlsys.models.known_shapes import look_up_shape
from rlsys.models.shapes import ModelShape

RANKS, SAMPLES = 8, 8


@dataclass(frozen=True)
class CountedCase:
    """An update of a known model with so many layers. Each of 8 ranks has two packs of a prompt and its 8 samples."""

    model: str
    layers: int
    zero_stage: int
    gradient_checkpointing: bool
    grad_dtype: str = "float32"
    head_dtype: str | None = None
    entropy_coef: float = 0.0
    lengths: tuple[int, int] = (512, 960)  # tokens of a prompt and of a completion

    @property
    def shape(self) -> ModelShape:
        known = look_up_shape(self.model)
        assert known
        return replace(known, layers=self.layers)

    @property
    def scored(self) -> int:
        """Tokens of a pack that are scored."""
        return SAMPLES * self.lengths[1]

    @property
    def tokens(self) -> int:
        return self.lengths[0] + self.scored

    @property
    def config(self) -> Config:
        policy = PolicyConfig(
            ranks=RANKS,
            dtype="bfloat16",
            grad_dtype=self.grad_dtype,
            zero_stage=self.zero_stage,
            gradient_checkpointing=self.gradient_checkpointing,
            head_dtype=self.head_dtype,
            tokens_per_pack=self.tokens,
        )
        return Config(
            cluster=ClusterConfig(device="gpu"),
            trainer=TrainerConfig(prompts_per_step=2 * RANKS, samples_per_prompt=SAMPLES),
            rollout=RolloutConfig(dtype="bfloat16"),
            policy=policy,
            entropy=EntropyConfig(coef=self.entropy_coef),
        )

    @property
    def sequence_lengths(self) -> SequenceLengths:
        return SequenceLengths(*self.lengths)
