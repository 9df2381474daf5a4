import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), tools=[add], system_prompt="Add with the tool.")
print(agent.invoke({"messages": [("user", sys.argv[1])]}, {"recursion_limit": 8})["messages"][-1].content)
