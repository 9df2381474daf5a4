import os
import sys
from pathlib import Path

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "default.yaml").read_text())
model = LitellmModel(model_name=f"openai/{os.environ['OPENAI_MODEL']}", cost_tracking="ignore_errors")
agent = DefaultAgent(model, LocalEnvironment(cwd=os.environ["RLSYS_FOLDER"]), **config["agent"] | {"step_limit": 4})
print(agent.run(sys.argv[1]))
