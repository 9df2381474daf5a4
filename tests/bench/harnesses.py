"""Plays agents' libraries as they are, in an environment of their own, and trains two steps with each.

.venv/bin/python tests/bench/harnesses.py [smolagents …]      about 10 minutes; downloads the libraries

In the first part the model writes calls that a test tells it to: how many requests the library makes, and how many replies it sends
back otherwise than they were written. In the second a tiny model with random weights is trained for two steps: what it writes
can hardly be read, and each library does with it what it does. Writes tests/bench/harnesses.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rlsys"))
sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "workers" / "episodes"))
from byte_model import END, byte_tokenizer, write_byte_model
from records import measuring
from written_engines import play_all

from rlsys.episodes.figures import episode_figures
from rlsys.runs.directory import read_lines

ROOT = Path(__file__).parents[2]
AGENTS = Path(__file__).with_suffix("")
RECORD = Path(__file__).with_suffix(".json")
PACKAGES = {  # by agent: what is installed, the first of which is the library
    "langgraph": ["langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4"],
    "langgraph_anthropic": ["langgraph==1.2.24", "langchain==1.5.2", "langchain-anthropic==1.7.10"],
    "mini_swe": ["mini-swe-agent==2.4.6"],
    "openai_agents": ["openai-agents==0.24.0"],
    "openai_agents_chat": ["openai-agents==0.24.0"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
}
WINDOW = 32_768
GRADE = """
def grade(row, program):
    return {"score": len(program.output) % 7, "answer": f"{program.exit_code} {program.output[-200:]}"}
"""


def writes(before: str) -> str:
    """A call of the library's tool, and then of the one that ends the episode, or the answer."""
    first = before.count("<|im_start|>assistant") == 1
    if '"bash"' in before:
        command = "echo 4" if first else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return call("bash", command=command)
    if first:
        return call("add", a=2, b=2)
    return call("final_answer", answer="4") if "final_answer" in before else "4"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def measure(agent: str, place: Path, python: Path) -> dict[str, Any]:
    library = PACKAGES[agent][0]
    with measuring(RECORD.name) as commit:
        (place / "grade.py").write_text(GRADE)
        command = f"{python} {AGENTS / agent}_agent.py {{prompt}}"
        model = random_model(place)
        return {
            **{"agent": agent, "library": library, "commit": commit},
            **told(command, place, model),
            **trained(command, place, model),
        }


def random_model(place: Path) -> Path:
    """A Llama of 0.2 M parameters whose tokens are bytes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = place / "model"
    folder.mkdir(exist_ok=True)
    shape = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    shape.max_position_embeddings, shape.vocab_size, shape.eos_token_id = WINDOW, len(byte_tokenizer()), END
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return write_byte_model(folder, str(folder), WINDOW)


def told(command: str, place: Path, model: Path) -> dict[str, Any]:
    options = {"command": command, "grade": f"{place}/grade.py:grade"}
    limits: dict[str, Any] = {"window": WINDOW, "max_turns": 8, "step_timeout_s": 120.0, "timeout_s": 600.0}
    rows = [{"prompt": "2+2?"}]
    played, _ = play_all(
        place, model, "", writes, rows, plays=("command",), options=options, tool_parser="hermes", **limits
    )
    [sample] = played
    assert sample.episode
    assert sample.episode.verdict
    return {
        "requests": sample.turn_count,
        "continued": sum(after >= 0 for after in sample.continued_turns),
        "unknown_replies": episode_figures(played).get("episode/unknown_replies", 0.0),
        "ended": sample.episode.verdict.answer or sample.episode.verdict.detail[-300:],
    }


def trained(command: str, place: Path, model: Path) -> dict[str, Any]:
    rows = "".join(json.dumps({"prompt": f"{n}+{n}?"}) + "\n" for n in range(8))
    (place / "rows.jsonl").write_text(rows)
    episode = {"command": command, "grade": f"{place}/grade.py:grade", "tool_parser": "hermes", "window": WINDOW}
    episode |= {"max_turns": 4, "step_timeout_s": 120, "concurrency": 4}
    options = {"model.path": model, "data.train": f"{place}/rows.jsonl", "episode": json.dumps(episode)}
    options |= {"trainer.steps": 2, "trainer.prompts_per_step": 2, "trainer.samples_per_prompt": 4, "eval.every": 0}
    options |= {"eval.datasets": "[]", "rollout.max_new_tokens": 48, "reward.functions": "{}", "run.dir": place / "run"}
    options |= {"rollout.engines": 1, "policy.ranks": 1, "rollout.kv_cache_mb": 512, "reference.kl_coef": 0}
    words = [f"{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "launch", "train", "configs/tiny_cpu.yaml", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    steps = (
        [line for line in read_lines(place / "run" / "metrics.jsonl") if line["step"]] if not done.returncode else []
    )
    wanted = ("episode/turns", "episode/unknown_replies", "mismatch/max_abs", "reward/failures")
    figures = [{name: round(line[name], 8) for name in wanted if name in line} for line in steps]
    return {"steps": figures or done.stdout[-500:] + done.stderr[-500:]}


if __name__ == "__main__":
    results = {r["agent"]: r for r in json.loads(RECORD.read_text())} if RECORD.exists() else {}
    for agent in sys.argv[1:] or PACKAGES:
        with tempfile.TemporaryDirectory(prefix="harness-") as folder:
            subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
            python, uv = Path(folder, "venv", "bin", "python"), Path(sys.executable).with_name("uv")
            subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *PACKAGES[agent]], check=True)
            results[agent] = measure(agent, Path(folder), python)
        RECORD.write_text(json.dumps([*results.values()], indent=1, ensure_ascii=False) + "\n")
        print(json.dumps(results[agent], ensure_ascii=False), flush=True)
