"""Loss and gradient norm of TRL's SFTTrainer on the rows of tests/rlsys/forward/test_supervised_loss.py, which holds them.

.venv/bin/python tests/bench/trl/sft_loss.py      TRL is installed into the environment of compare.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
TRL = """
import json, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

folder = sys.argv[1]
for name, rows in json.load(open(f"{folder}/rows.json")).items():
    rows = [
        {"prompt": r["prompt"], "completion": r["answer"]} if name == "texts"
        else {"prompt": r["prompt"], "completion": [{"role": "assistant", "content": r["answer"]}]}
        for r in rows
    ]
    settings = dict(per_device_train_batch_size=len(rows), max_steps=1, logging_steps=1, report_to=[], max_grad_norm=1e9)
    args = SFTConfig(f"{folder}/out", use_cpu=True, bf16=False, gradient_checkpointing=False, learning_rate=1e-9, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    print("TRL", json.dumps([name, *(trainer.state.log_history[0][k] for k in ("loss", "grad_norm"))]))
"""


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from compare import installed

    python = installed(Path.home() / ".cache" / "rlsys" / "bench-trl")
    with tempfile.TemporaryDirectory() as folder:
        paths = [ROOT, ROOT / "tests" / "rlsys", ROOT / "tests" / "rlsys" / "data"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        rows = ROOT / "tests" / "rlsys" / "forward" / "test_supervised_loss.py"
        subprocess.run([sys.executable, rows, folder], check=True, env=environment)
        done = subprocess.run([python, "-c", TRL, folder], check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("TRL "):
            name, loss, norm = json.loads(line.removeprefix("TRL "))
            print(f"{name}: loss {loss}, gradient norm {norm}")


if __name__ == "__main__":
    main()
