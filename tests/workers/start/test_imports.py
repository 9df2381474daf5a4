"""What loading a tokenizer imports, seen in a process of its own."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from launch.models import load_tokenizer
from rlsys.config.schema import Config

model = sys.argv[1]
tokenizer = load_tokenizer(model, Config())
compiler = "torch._dynamo" in sys.modules

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import GenerationMixin

ids = tokenizer("12>", return_tensors="pt")["input_ids"]
output = AutoModelForCausalLM.from_pretrained(model).generate(ids, max_new_tokens=2)
print(json.dumps([compiler, type(tokenizer) is type(AutoTokenizer.from_pretrained(model)), GenerationMixin.__module__, len(output[0]) - len(ids[0])]))
"""


def test_a_tokenizer_imports_no_compiler_and_generate_works_afterwards(model: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, model], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    compiler, same, mixin, generated = json.loads(done.stdout.splitlines()[-1])
    assert (compiler, same, mixin) == (False, True, "transformers.generation.utils")
    assert 1 <= generated <= 2
