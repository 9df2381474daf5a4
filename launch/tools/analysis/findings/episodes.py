"""Checks for trouble with episodes: their limits, and the calls of tools."""

from launch.tools.analysis.findings.learning import is_cut_often, truncation_rises
from launch.tools.analysis.findings.run_data import MIN_STEPS, Finding, Findings, RunData, as_percent
from rlsys.config.plugins import short_name
from rlsys.types import TRUNCATIONS

WAITING = 1 / 3  # share of time
UNREADABLE = 0.9  # share of tool calls that cannot be read
LIMITS = {  # by finish
    "turns": "episode.max_turns",
    "tokens": "episode.max_tokens",
    "window": "episode.window",
    "time": "episode.step_timeout_s or episode.timeout_s",
}


def cut_episodes(run: RunData) -> Findings:
    """Many episodes end at a limit: a share of 0.9 or more, or one that has risen by 0.1 or more, to 0.1 or more."""
    cut = run.trend("length/truncated")
    if not cut or not run.has_episodes or not is_cut_often(cut):
        return
    shares = {reason: run.recent_mean(f"episode/finish/{reason}") or 0.0 for reason in TRUNCATIONS}
    reason = max(shares, key=lambda reason: shares[reason])
    yield Finding(
        "warning",
        "Episodes are cut more often" if truncation_rises(cut) else "Nearly all episodes are cut",
        f"{as_percent(cut.after)} of them end at a limit, {as_percent(cut.before)} did at the start; most often at "
        f"{LIMITS.get(reason, 'rollout.max_new_tokens')}. Such an episode is judged before it is over. Raise the limit, "
        "or leave these episodes out of the loss with overlong.mask.",
        figures=(*(f"episode/finish/{reason}" for reason, share in shares.items() if share), "episode/turns"),
        steps=cut.steps,
        samples={"step": cut.steps[1], "finish": reason, "set": "step"},
    )


def slow_environments(run: RunData) -> Findings:
    """Training waits for samples in a third of its time, and in a third of that all engines wait for environments."""
    rollout, step = run.recent_mean("time/rollout"), run.recent_mean("time/step")
    busy = [share for name, share in run.busy_share.items() if name.startswith("rollout-")]
    if not run.has_episodes or not rollout or not step or not busy or rollout / step < WAITING:
        return
    idle = 1 - max(busy) / (rollout / step)
    if idle < WAITING:
        return
    yield Finding(
        "warning",
        "Engines wait for environments",
        f"Training waited for samples in {as_percent(rollout / step)} of the last steps. In {as_percent(idle)} of that "
        "time no engine had a turn to write: all episodes waited for what answers the model, or for its process. Play "
        "more episodes at a time (trainer.prompts_per_step, episode.concurrency), in more processes "
        "(episode.workers), or sample ahead of training (pipeline.max_lag).",
        figures=("time/rollout", "episode/turns"),
    )


def unreadable_calls(run: RunData) -> Findings:
    """In recent steps nine tenths of the model's tool calls or more could not be read."""
    share = run.recent_mean("episode/unreadable_calls")
    if share is None or share < UNREADABLE:
        return
    steps = [step for step, _ in run.series("episode/unreadable_calls")]
    parser = run.config.episode.tool_parser if run.config else ""
    yield Finding(
        "warning",
        "No tool call can be read" if share == 1 else "Hardly any tool call can be read",
        f"{as_percent(share)} of the calls could not be read in recent steps; each has its reason among the samples. "
        f"episode.tool_parser ({parser or 'chosen from the model'}) may not be that of the model, the chat template may "
        "not describe the tools, or turns may be cut at rollout.max_new_tokens.",
        figures=("episode/unreadable_calls", "episode/tool_calls"),
        steps=(steps[0], steps[-1]),
        samples={"step": steps[-1], "set": "step"},
    )


def unused_tools(run: RunData) -> Findings:
    """A tool of episode.tools had no readable call in any step, after eight steps or more. MCP servers are left out."""
    steps = [step for step, _ in run.series("episode/turns")]
    if run.config is None or len(steps) < MIN_STEPS or (run.recent_mean("episode/unreadable_calls") or 0) >= UNREADABLE:
        return
    names = [short_name(tool) for tool in run.config.episode.tools if isinstance(tool, str)]
    unused = [name for name in names if not any(n for _, n in run.series(f"episode/tool_calls/{name}"))]
    if not unused:
        return
    yield Finding(
        "note",
        f"{' and '.join(unused)}: never called",
        f"The model has not called {'this tool' if len(unused) == 1 else 'these tools'} in any of {len(steps)} steps. "
        "What nobody tries, no reward can teach: say in the prompts when to call it, give examples, or leave it out of "
        "episode.tools.",
        figures=("episode/tool_calls", *(f"episode/tool_calls/{name}" for name in names if name not in unused)),
        steps=(steps[0], steps[-1]),
        samples={"step": steps[-1], "set": "step"},
    )
