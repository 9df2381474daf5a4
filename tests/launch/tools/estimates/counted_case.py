"""What `counted_update.py` counts, and `test_device_memory.py` estimates."""

from dataclasses import dataclass, replace
from typing import Any

from launch.tools.estimates.memory import SequenceLengths
from rlsys.config.methods import EntropyConfig
from rlsys.config.schema import ClusterConfig, Config, PolicyConfig, RolloutConfig, TrainerConfig
from rlsys.models.config_json import parse_config
from rlsys.models.known_shapes import look_up_shape
from rlsys.models.shapes import ModelShape

RANKS, SAMPLES = 8, 8  # samples of a prompt

# Sizes of models that are not in our table of well-known ones.
OTHERS: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.1": {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    | {"sliding_window": 4096},
    "Gemma-2-9B": {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "vocab_size": 256000}
    | {"num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    | {"sliding_window": 4096, "attn_logit_softcapping": 50.0},
    "Gemma-3-4B": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "vocab_size": 262208}
    | {"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    | {"sliding_window": 1024},
}


@dataclass(frozen=True)
class CountedCase:
    """An update of a known model with so many layers. Each of 8 ranks has two packs of a prompt and some of its samples."""

    model: str
    layers: int
    zero_stage: int
    gradient_checkpointing: bool
    grad_dtype: str = "float32"
    head_dtype: str | None = None
    entropy_coef: float = 0.0
    lengths: tuple[int, int] = (512, 960)  # tokens of a prompt and of a completion
    samples: int = SAMPLES  # of a pack

    @property
    def shape(self) -> ModelShape:
        known = parse_config(self.model, self.settings) if self.settings else look_up_shape(self.model)
        assert known
        return replace(known, layers=self.layers)

    @property
    def settings(self) -> dict[str, Any]:
        """Of its config.json, where our table does not have the model."""
        return OTHERS.get(self.model, {})

    @property
    def scored(self) -> int:
        """Tokens of a pack that are scored."""
        return self.samples * self.lengths[1]

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
            trainer=TrainerConfig(prompts_per_step=2 * RANKS * self.samples // SAMPLES, samples_per_prompt=SAMPLES),
            rollout=RolloutConfig(dtype="bfloat16"),
            policy=policy,
            entropy=EntropyConfig(coef=self.entropy_coef),
        )

    @property
    def sequence_lengths(self) -> SequenceLengths:
        return SequenceLengths(*self.lengths)
