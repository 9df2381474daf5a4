"""Runs the steps of docker/Dockerfile without Docker: in a clean root file system, and then trains in it.

    make image        or, where packages come from folders of this machine:
    python tests/bench/image.py --share /folder/with/wheels --share /etc/ssl/certs
    python tests/bench/image.py --target gpu         # packages for CUDA; without a GPU nothing is trained

The base image is played by the Debian release in its name, made by debootstrap, with Debian's own Python of that version; NVIDIA's by
Debian bookworm. Each stage is a folder, each RUN a chroot in namespaces of its own. Takes root, a minute for the base and a few for the
rest. What it does not show: that the base images exist under their names, and what NVIDIA's and Ubuntu have that Debian has not.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED = (
    "PIP_",
    "UV_",
    "SSL_CERT_FILE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "http_proxy",
    "https_proxy",
)  # as build arguments would
DEMO = [
    "configs/tiny_cpu.yaml",
    "trainer.steps=5",
    "eval.every=0",
    "rollout.engines=1",
    "policy.ranks=1",
    "reward.workers=1",
]
FOR_CUDA = """
import deepspeed, torch, vllm
assert torch.version.cuda, "torch is a CPU build"
print(f"torch {torch.__version__}, vLLM {vllm.__version__}, DeepSpeed {deepspeed.__version__}")
"""


@dataclass
class Stage:
    """`FROM base AS name`, and what follows it."""

    base: str
    name: str
    steps: list[tuple[str, str]]
    root: Path = Path()
    user: str = "root"
    folder: str = "/"
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    command: list[str] = field(default_factory=list)
    health: str = ""


def read(dockerfile: Path) -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    for step in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = step.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = stage = Stage(base, name, [])
        elif word:
            stage.steps.append((word, rest.strip()))
    return stages


class Builder:
    def __init__(self, work: Path, share: list[Path]):
        self.work, self.share, self.stages = work, share, read(ROOT / "docker" / "Dockerfile")

    def build(self, name: str) -> Stage:
        """Where the stage's folder is there already, only what its steps say of the commands to come."""
        stage = self.stages[name]
        if stage.root != Path():
            return stage
        done, making = self.work / name, self.work / f"{name}.making"
        if not done.is_dir():
            shutil.rmtree(making, ignore_errors=True)
            subprocess.run(["cp", "--archive", "--reflink=auto", self.base(stage.base), making], check=True)
        stage.root = done if done.is_dir() else making
        for word, rest in stage.steps:
            if word in ("RUN", "COPY") and done.is_dir():
                continue
            began = time.monotonic()
            getattr(self, word.lower())(stage, rest)
            print(f"{name:>10}  {word} {' '.join(rest.split())[:90]}  ({time.monotonic() - began:.1f} s)", flush=True)
        if not done.is_dir():
            making.rename(done)
        stage.root = done
        return stage

    def base(self, image: str) -> Path:
        """The Debian that an official Python image stands on, and its Python; for NVIDIA's image a Debian with nothing more."""
        version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-(\w+)", image)
        assert version or image.startswith("nvidia/cuda:"), f"{image} is no official slim Python image"
        release = version[2] if version else "bookworm"
        packages = ["ca-certificates", *([f"python{version[1]}", "python3-venv"] if version else [])]
        root = self.work / f"base-{'-'.join([release, *packages[1:]])}"
        if not root.is_dir():
            aside = root.with_suffix(".making")
            shutil.rmtree(aside, ignore_errors=True)
            wanted = f"--include={','.join(packages)}"
            subprocess.run(
                ["debootstrap", "--variant=minbase", wanted, release, aside], check=True, stdout=subprocess.DEVNULL
            )
            aside.rename(root)
        return root

    def run(self, stage: Stage, command: str, network: bool = True) -> None:
        subprocess.run(self.inside(stage, command, network), check=True, env=stage.environment | passed())

    def inside(self, stage: Stage, command: str, network: bool) -> list[str]:
        """The command in namespaces of its own, as the stage's user."""
        root = stage.root
        before = [
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs -o ro sysfs {root}/sys",
            f"mount -t tmpfs tmpfs {root}/dev",
            f"cp --archive /dev/null /dev/zero /dev/random /dev/urandom {root}/dev/",
            f"ln -s /proc/self/fd {root}/dev/fd",
            f"mkdir -m 1777 {root}/dev/shm",
            f"mount -t tmpfs tmpfs {root}/dev/shm",
        ]
        if network:
            before += [f"cp --remove-destination /etc/resolv.conf {root}/etc/resolv.conf"]
            before += [f"mkdir -p {root}{place} && mount --bind {place} {root}{place}" for place in self.share]
        else:
            before += ["ip link set lo up"]
        shell = ["/bin/sh", "-c", f"cd {stage.folder} && {command}"]
        enter = shlex.join(["chroot", f"--userspec={stage.user}", str(root), *shell])
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        return [*apart, "sh", "-c", " && ".join([*before, f"HOME={self.home(stage)} exec {enter}"])]

    def home(self, stage: Stage) -> str:
        return "/root" if stage.user == "root" else f"/home/{stage.user}"

    def workdir(self, stage: Stage, folder: str) -> None:
        stage.folder = folder
        (stage.root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def user(self, stage: Stage, name: str) -> None:
        stage.user = name

    def env(self, stage: Stage, text: str) -> None:
        name, _, value = text.partition("=")
        stage.environment[name] = value.replace("$PATH", stage.environment["PATH"])

    def cmd(self, stage: Stage, text: str) -> None:
        stage.command = json.loads(text)

    def healthcheck(self, stage: Stage, text: str) -> None:
        stage.health = text.partition("CMD ")[2]

    def copy(self, stage: Stage, text: str) -> None:
        """`.` is what .dockerignore leaves of the repository."""
        options = dict(re.findall(r"--(\w+)=(\S+)", text))
        *sources, target = [word for word in text.split() if not word.startswith("--")]
        to = stage.root / os.path.join(stage.folder, target).lstrip("/")
        if "from" in options:
            shutil.copytree(
                self.build(options["from"]).root / sources[0].lstrip("/"), to, symlinks=True, dirs_exist_ok=True
            )
        elif sources != ["."]:
            to.mkdir(parents=True, exist_ok=True)
            for source in sources:
                shutil.copy2(ROOT / source, to)
        else:
            ignored = (ROOT / ".dockerignore").read_text().split()
            shutil.copytree(
                ROOT,
                to,
                symlinks=True,
                dirs_exist_ok=True,
                ignore=lambda place, names: [n for n in names if left_out(Path(place, n), ignored)],
            )
        if owner := options.get("chown"):
            subprocess.run(
                ["chroot", stage.root, "chown", "-R", owner, "/" + str(to.relative_to(stage.root))], check=True
            )


def left_out(path: Path, ignored: list[str]) -> bool:
    name = str(path.relative_to(ROOT))
    return any(
        fnmatch.fnmatch(name, rule.strip("/")) or (rule.startswith("**/") and fnmatch.fnmatch(path.name, rule[3:]))
        for rule in ignored
    )


def passed() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}


@contextlib.contextmanager
def room(kept: Path | None) -> Iterator[Path]:
    if kept:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
    else:
        with tempfile.TemporaryDirectory(prefix="image-") as folder:
            yield Path(folder)


def size(folder: Path) -> str:
    return subprocess.run(["du", "-sh", "--one-file-system", folder], capture_output=True, text=True).stdout.split()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--share", type=Path, action="append", default=[], help="a folder of this machine that steps may read"
    )
    parser.add_argument(
        "--keep", type=Path, help="where file systems are made, and stay; those that are there are used"
    )
    parser.add_argument("--target", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    with room(options.keep) as work:
        builder = Builder(work, options.share)
        stage = builder.build(options.target)
        print(f"the image has {size(stage.root)}, {size(stage.root / 'rlsys' / '.venv')} of it packages")
        number = 1000 if options.target == "cpu" else 1001
        user = f"test $(id -u) = {number} && test $(id -un) = rlsys && ! touch /etc/passwd 2> /dev/null"
        builder.run(stage, user, network=False)
        builder.run(stage, shlex.join(stage.command) + " > /dev/null", network=False)
        builder.run(stage, stage.health, network=False)
        head = "ray get-auth-token --generate && ray start --head --node-ip-address=127.0.0.1 --num-cpus=1"
        builder.run(stage, f"({head}) > /dev/null 2>&1 && {stage.health} && ray stop", network=False)
        if options.target == "cpu":
            began = time.monotonic()
            builder.run(stage, shlex.join(["rlsys", "train", *DEMO]), network=False)
            print(f"trained as its user, with no network, in {time.monotonic() - began:.0f} s")
        else:
            builder.run(stage, f"python -c {shlex.quote(FOR_CUDA)}", network=False)


if __name__ == "__main__":
    main()
