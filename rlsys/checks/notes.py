"""Finds choices that are allowed and probably not meant. Each is a sentence at the start of a run."""

from collections.abc import Iterator

from rlsys.config.derived import MEAN_OF_SEQUENCES, token_weighting, updates_of_step
from rlsys.config.methods import AlgorithmConfig
from rlsys.config.schema import Config
from rlsys.episodes.formats import CALL_ENDS
from rlsys.episodes.settings import plays

# Built-in rewards whose scores are never below 0. What others return, such as a model or a function of the user, is not known.
FROM_ZERO = (
    *("exact", "contains", "regex", "math", "code", "countdown", "json_schema", "format", "length", "zigzag"),
    "reasoning_gym",
)


def find_notes(c: Config) -> Iterator[str]:
    a, weighting = c.algorithm, token_weighting(c)
    if a.loss in MEAN_OF_SEQUENCES and weighting != "sequence_mean":
        yield f"algorithm.normalize {weighting}: {a.loss} was published with sequence_mean, which auto is."
    if a.advantage == "dr_grpo" and weighting not in ("constant", "decoupled"):  # DeGRPO has this advantage too
        yield f"algorithm.normalize {weighting}: with advantage dr_grpo, Dr. GRPO's paper has constant."
    if weighting == "decoupled" and not a.control_tokens and a.control_weight == AlgorithmConfig().control_weight:
        yield (
            "algorithm.normalize decoupled without control_tokens: every completion's first token is a control token, "
            f"of weight {a.control_weight:g}."
        )
    if c.reference.kl_coef and c.reference.kl_in == "reward" and a.kl not in ("auto", "k1"):
        yield f"algorithm.kl {a.kl} in the reward: its gradient is biased and nearly 0 close to the reference; k1's is exact."
    if a.std == "none" and a.eps is not None and a.advantage not in ("gdpo", "max_rl"):  # these divide otherwise too
        yield f"algorithm.eps {a.eps:g}: without effect, because algorithm.std none divides by no deviation."
    if c.reward.per_token and (parts := maybe_negative(c)):
        yield (
            f"reward.per_token: where {' or '.join(parts)} makes a reward negative, a long completion loses less, because "
            "that is divided too."
        )
    if c.episode.tool_parser and c.episode.tool_parser not in CALL_ENDS:
        yield (
            f"episode.tool_parser {c.episode.tool_parser}: rlsys does not know what ends its calls. Of an answer that the "
            "limit of tokens cuts, the last call is not made, even if it is whole."
        )
    yield from endless_warmup(c)


def maybe_negative(c: Config) -> list[str]:
    """Returns what may make a reward negative, as far as the configuration tells."""
    sets = [c.reward.functions, *(source.reward for source in c.data.train.values())]
    functions = [pair for functions in sets for pair in functions.items()]
    parts = sorted({name for name, f in functions if f.weight < 0 or (f.function or name) not in FROM_ZERO})
    parts += ["an episode's own score"] * bool(plays(c)) + ["overlong.penalty"] * bool(c.overlong.buffer)
    return parts + [f"reward.on_failure {c.reward.on_failure}"] * ((c.reward.failure_score or 0) < 0)


def endless_warmup(c: Config) -> Iterator[str]:
    has_critic = c.algorithm.advantage == "gae"
    alone = c.critic.alone_steps if has_critic else 0
    models = [("policy", c.policy, c.trainer.steps - alone)] + [("critic", c.critic, c.trainer.steps)] * has_critic
    for name, section, steps in models:
        updates = steps * updates_of_step(c)
        if section.warmup_updates > updates:
            yield f"{name}.warmup_updates {section.warmup_updates}: the run has {updates} updates, so the rate never reaches {name}.lr."
