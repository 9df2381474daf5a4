import os
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


model = ChatAnthropic(model=os.environ["ANTHROPIC_MODEL"], max_tokens=100)
agent = create_agent(model, tools=[add], system_prompt="Add with the tool.")
print(agent.invoke({"messages": [("user", sys.argv[1])]}, {"recursion_limit": 8})["messages"][-1].content)
