import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


set_tracing_disabled(True)
set_default_openai_api("chat_completions")
agent = Agent(name="sums", instructions="Add with the tool.", tools=[add], model=os.environ["OPENAI_MODEL"])
print(Runner.run_sync(agent, sys.argv[1], max_turns=4).final_output)
