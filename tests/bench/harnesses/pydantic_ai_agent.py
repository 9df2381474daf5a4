import os
import sys

from pydantic_ai import Agent

agent = Agent(f"openai:{os.environ['OPENAI_MODEL']}", instructions="Add with the tool.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


print(agent.run_sync(sys.argv[1]).output)
