import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


model = OpenAIModel(os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"])
print(ToolCallingAgent(tools=[add], model=model, max_steps=4).run(sys.argv[1]))
