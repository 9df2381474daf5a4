"""What some models do to their logits after the output layer."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """z -> cap tanh(scale z / cap); without a cap, z -> scale z. `LogitTransform(cap=30.0)`"""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, model_config: Any) -> "LogitTransform":
        config = model_config.get_text_config()
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return cls(scale / divisor, getattr(config, "final_logit_softcapping", None))

    def apply_(self, logits: Tensor) -> Tensor:
        """Changes them in place: they are the largest tensors of a pass."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, transformed: Tensor) -> Tensor | float | None:
        """Returns d transformed / d logits. None: 1."""
        if self.cap is None:
            return None if self.scale == 1 else self.scale
        slope = (transformed / self.cap).square_().neg_().add_(1)
        return slope if self.scale == 1 else slope.mul_(self.scale)


UNCHANGED = LogitTransform()
