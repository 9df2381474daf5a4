"""Runs programs that a model wrote, isolated from the host. Others import what they need from here: see README.md."""

from rlsys.sandbox.levels import IsolationLevel
from rlsys.sandbox.marked import KILL_TIMEOUT_S, kill_marked
from rlsys.sandbox.outcome import ProgramResult, SandboxError
from rlsys.sandbox.runner import describe_level, run_program, strongest_level, why_unavailable

__all__ = (
    "KILL_TIMEOUT_S",
    "IsolationLevel",
    "ProgramResult",
    "SandboxError",
    "describe_level",
    "kill_marked",
    "run_program",
    "strongest_level",
    "why_unavailable",
)
