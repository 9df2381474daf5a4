"""What a training run asks of the tools, which are imported when it asks."""

from collections.abc import Sequence
from typing import Any

from launch.train import Advisers
from rlsys.agreement import Agreement
from rlsys.config.schema import Config
from rlsys.errors import Disagreement
from rlsys.runs.progress import Note


def choose_checkpointing(config: Config, nodes: Sequence[dict[str, Any]], note: Note) -> Config:
    from launch.tools.fitting.checkpointing import with_checkpointing_chosen

    return with_checkpointing_chosen(config, nodes, note)


def explain_disagreement(agreement: Agreement, weights: dict[str, str], *, policy: Any, config: Config) -> Disagreement:
    from launch.tools.diagnosis.explain import explain_disagreement

    return explain_disagreement(agreement, weights, policy=policy, config=config)


ADVISERS = Advisers(choose_checkpointing, explain_disagreement)
