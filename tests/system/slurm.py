"""A Slurm of two hosts on this machine: a controller, and a slurmd in each host."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hosts import NETWORK, Host, hosts

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CONFIGURATION = """ClusterName=test
SlurmctldHost={name}({network}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort=26817
SlurmdPort=26818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
JobRequeue=1
KillWait=60
SlurmctldTimeout=30
SlurmdTimeout=30
MessageTimeout=60
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """`Slurm(hosts, folder, environment).start()`; `slurm("sbatch", …)` runs one of its commands."""

    def __init__(self, hosts: list[Host], folder: Path, environment: dict[str, str]):
        self.hosts, self.folder = hosts, folder
        self.environment = environment | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, gpus: int) -> "Slurm":
        for place in ("munge", "state"):
            (self.folder / place).mkdir(mode=0o700)
        nodes = [f"NodeName={h.name} NodeAddr={h.address} CPUs=2 Gres=gpu:{gpus}" for h in self.hosts]
        conf = CONFIGURATION.format(
            name=socket.gethostname(), network=NETWORK, folder=self.folder, nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[1-{gpus}]\n")
        for i in range(gpus):
            (self.folder / f"gpu{i + 1}").touch()
        (self.folder / "munge" / "key").write_bytes(os.urandom(128))
        (self.folder / "munge" / "key").chmod(0o400)
        munge = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self.run("munged", "--foreground", "--force", f"--socket={self.folder}/munge/socket", *munge)
        self.run("slurmctld", "-D")
        for host in self.hosts:
            with (self.folder / f"{host.name}.log").open("w") as out:
                host.start(["slurmd", "-D", "-N", host.name], self.environment, out)
        self.until(lambda: self("sinfo", "--noheader", "--format=%T %D") == f"idle {len(self.hosts)}\n")
        return self

    def run(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.log").open("w")
        process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)

    def __call__(self, *command: str, folder: Path | None = None, **more: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=self.environment | more, cwd=folder
        )
        return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def state(self, job: str) -> str:
        fields = dict(word.partition("=")[::2] for word in self("scontrol", "show", "job", job).split() if "=" in word)
        return f"{fields.get('JobState')} {fields.get('ExitCode')} restarts {fields.get('Restarts')}"

    def over(self, job: str) -> bool:
        return self.state(job).split()[0] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

    def until(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "\n".join(p.read_text()[-3000:] for p in self.folder.glob("*.log"))
            time.sleep(0.3)

    def end(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


@contextlib.contextmanager
def slurm_of_two(folder: Path, own: list[Path], environment: dict[str, str], gpus: int) -> Iterator[Slurm]:
    with hosts(2, own) as two_hosts:
        slurm = Slurm(two_hosts, folder, environment)
        try:
            yield slurm.start(gpus)
        finally:
            slurm.end()


def missing() -> list[str]:
    return [name for name in NEEDED if not shutil.which(name)]
