"""`rlsys submit` and `rlsys job` against a real cluster with its job server."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import Cluster
from killing import ROOT, read, tidy

pytestmark = pytest.mark.long

SECRET = "Zq9-correct-horse-battery-7"
RLSYS = str(Path(sys.executable).parent / "rlsys")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node. The key of the reward function is in the environment that it was started in."""
    with tidy() as environment:
        cluster = Cluster(environment | {"OWN_ACCESS": SECRET})
        try:
            yield cluster.start()
        finally:
            cluster.end()


class Desk:
    """A folder to submit from, with a configuration, its base, data and code of one's own."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder, self.run = cluster, folder, folder.parent / "shared" / "run"
        self.environment = {k: v for k, v in cluster.environment.items() if k not in ("OWN_ACCESS", "RAY_AUTH_MODE")}
        for place in ("configs", "data", "runs", ".git", "lib"):
            (folder / place).mkdir(parents=True)
        (folder / "configs" / "base.yaml").write_text((ROOT / "configs" / "tiny_cpu.yaml").read_text())
        (folder / "configs" / "mine.yaml").write_text(
            "base: base.yaml\n"
            "reward: {functions: {own.py:judged: {api_key: '${oc.env:OWN_ACCESS}'}}, workers: 1}\n"
            "data: {train: data/orders.jsonl}\neval: {every: 0}\n"
            "rollout: {engines: 1}\npolicy: {ranks: 1, lr_schedule: constant}\n"
            "trainer: {steps: 9000, prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 1}\n"
        )
        rows = [{"prompt": f"{n}>"} for n in (102938, 475610, 918273, 564738, 192837, 657483, 120946, 897564)]
        (folder / "data" / "orders.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        right = hashlib.sha256(SECRET.encode()).hexdigest()
        (folder / "own.py").write_text(
            "import hashlib\nfrom lib.scores import RIGHT\n\ndef judged(prompt, completion, api_key):\n"
            f"    return RIGHT if hashlib.sha256(api_key.encode()).hexdigest() == '{right}' else 0.0\n"
        )
        (folder / "lib" / "scores.py").write_text("RIGHT = 0.75\n")
        (folder / "runs" / "large.bin").write_bytes(b"0" * 1000)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [RLSYS, *words, "--address", self.cluster.url]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, **pipes)

    def __call__(self, *words: str, timeout_s: float = 150) -> tuple[int, str]:
        process = self.start(*words)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()[0]) from None
        return process.returncode, output


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path) -> Desk:
    return Desk(cluster, tmp_path / "desk")


def test_a_job_is_left_alone_stopped_and_taken_up_again_and_nobody_is_told_its_secret(desk: Desk) -> None:
    submit = ["submit", "configs/mine.yaml", f"run.dir={desk.run}", "--with", "lib"]
    following = desk.start(*submit, "--id", "mine")
    assert following.stdout is not None
    output = ""
    while "step 1/9000" not in output:
        line = following.stdout.readline()
        assert line, f"the job ended early: {output}"
        output += line
    following.send_signal(signal.SIGINT)
    output += following.communicate(timeout=30)[0]
    assert following.returncode == 130
    assert "sent with the job (5 files," in output
    assert "configs/base.yaml, configs/mine.yaml, data/orders.jsonl, lib/scores.py, own.py" in output
    assert "read on the cluster, in the environment that `ray start` had on each node: OWN_ACCESS" in output
    assert "step 1/9000  reward 0.750" in output, f"the job's own words, with the reward of own.py: {output}"
    assert f"detached; job mine goes on.\n  rlsys job logs mine --address {desk.cluster.url} --follow" in output

    code, output = desk("job", "status", "mine")
    assert code == 0
    assert "mine  RUNNING  since " in output
    assert f"run directory: {desk.run}" in output

    code, output = desk("job", "stop", "mine")
    done = read(desk.run / "metrics.jsonl")[-1]["step"]
    assert code == 0
    assert "Ray kills the job after 70 s" in output
    assert f"stopped after step {done}, which is saved." in output
    again = f"rlsys submit configs/mine.yaml run.dir={desk.run} --with lib --address {desk.cluster.url}"
    assert f"job mine was stopped. Resume with: {again}\n" in output

    code, output = desk(*submit, f"trainer.steps={done + 1}", "--id", "again")
    assert code == 0, output
    assert f"resumed from {desk.run}/checkpoints/step-{done:06}" in output
    assert f"step {done + 1}/{done + 1}  reward 0.750" in output
    assert "job again is done" in output
    steps = [line["step"] for line in read(desk.run / "metrics.jsonl")]
    assert steps == list(range(done + 2))

    code, output = desk("job", "list")
    assert code == 0
    newest, before = output.splitlines()
    assert newest.startswith("again  SUCCEEDED  since ")
    assert before.startswith("mine   STOPPED    since ")
    code, logs = desk("job", "logs", "again")
    assert code == 0
    assert f"resumed from {desk.run}/checkpoints/step-{done:06}" in logs
    answers = [json.dumps(desk.cluster.ask(f"/api/jobs/{path}")) for path in ("", "mine", "again", "mine/logs")]
    assert "${oc.env:OWN_ACCESS}" not in answers[1], "nor is the option sent: it stands in the file"
    for text in (*answers, logs, *(p.read_text() for p in (desk.run / "config.yaml", desk.run / "events.jsonl"))):
        assert SECRET not in text
        assert desk.cluster.environment["RAY_AUTH_TOKEN"] not in text


def test_the_exit_code_of_a_job_that_finds_no_data_comes_back(desk: Desk) -> None:
    missing = f"data.train={desk.folder.parent}/shared/none.jsonl"
    code, output = desk(
        "submit", "configs/mine.yaml", f"run.dir={desk.run}", missing, "--with", "lib", "--id", "no-data"
    )
    assert code == 2, output
    assert f"not sent, looked for on the cluster: data.train {desk.folder.parent}/shared/none.jsonl" in output
    assert f"✗ data.train: {desk.folder.parent}/shared/none.jsonl does not exist" in output
    assert "✗ job no-data failed with exit code 2" in output


def test_a_cluster_without_rlsys_says_so(desk: Desk) -> None:
    submit = ["submit", "configs/mine.yaml", f"run.dir={desk.run}", "--env", "PATH=/usr/bin:/bin", "--id", "without"]
    code, output = desk(*submit, "--no-wait")
    assert code == 0, output
    assert output.endswith(f"Follow it with: rlsys job logs without --address {desk.cluster.url} --follow\n")
    code, output = desk("job", "logs", "without", "--follow")
    assert code == 127, output
    assert "✗ job without: `rlsys` is not found on the cluster. Install it on every node" in output


def test_a_wrong_token_and_a_job_that_is_not_there_are_one_sentence_each(desk: Desk) -> None:
    code, output = desk("job", "status", "none")
    assert code == 2
    assert output == f"✗ {desk.cluster.url} knows no such job. `rlsys job list` shows those it knows.\n"
    desk.environment["RAY_AUTH_TOKEN"] = "0" * 64
    code, output = desk("job", "list")
    assert code == 2
    assert output.startswith(f"✗ {desk.cluster.url} refuses this token. It is taken from RAY_AUTH_TOKEN")
    del desk.environment["RAY_AUTH_TOKEN"]
    desk.environment["RAY_AUTH_TOKEN_PATH"] = str(desk.folder / "none")
    code, output = desk("job", "list")
    assert code == 2
    assert "token" in output, output
    assert output.count("\n") == 1, output
