"""Tools that the model may call: the sandbox's Python, functions of the user's, MCP servers."""

from rlsys.episodes.tools.tool import Tool, call_tool, cut_middle
from rlsys.episodes.tools.toolbox import Toolbox, tool_problems

__all__ = ["Tool", "Toolbox", "call_tool", "cut_middle", "tool_problems"]
