"""What the READMEs tell people to type: commands, files of their own, and options, as the text has them."""

import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "docker", "launch", "rlsys", "tests", "workers")
PAGES = sorted([*ROOT.glob("*.md"), *(page for room in ROOMS for page in (ROOT / room).rglob("*.md"))])
NAME = re.compile(r"# (\S+\.(?:py|yaml|yml|jsonl))(?:\s|$)")  # a block that begins so is a file of that name
SECTION = re.compile(r"\w+:$")  # a block of Python goes on as a configuration
STARTS = ("rlsys ", "ray job submit ", "make ", "RAY_AUTH_MODE=token ray ")
FOREIGN = ("docker ", "sbatch ", "kubectl ", "sky ")  # not run here, but their files and targets must be there


@dataclass
class Block:
    """Lines that are set apart: indented by four, or fenced."""

    page: Path
    line: int
    lines: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that it is, if it is one."""
        match = NAME.match(self.lines[0]) if self.lines else None
        return match[1] if match else ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def blocks(page: Path) -> list[Block]:
    """A blank line and another file's name begin another block."""
    blocks_of_page: list[Block] = []
    fenced = before_blank = False
    block: Block | None = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.strip().startswith("```"):
            fenced, block = not fenced, None
            continue
        inside = fenced or (line.startswith("    ") and (block is not None or before_blank))
        if inside:
            text = line if fenced else line[4:]
            if block is None or NAME.match(text) or (block.file.endswith(".py") and SECTION.match(text)):
                block = Block(page, number)
                blocks_of_page.append(block)
            block.lines.append(text)
        elif line.strip():
            block = None
        elif block is not None:
            block.lines.append("")
        before_blank = not line.strip()
    for block in blocks_of_page:
        while block.lines and not block.lines[-1].strip():
            block.lines.pop()
    return blocks_of_page


def commands(page: Path, starts: tuple[str, ...] = STARTS) -> list[tuple[str, str]]:
    """(location, command) in blocks and between backticks, without the explanation after two blanks or #."""
    commands_of_pages = []
    for block in blocks(page):
        for i, line in enumerate(block.lines):
            text = line.removeprefix("$ ").strip()
            if text.startswith(starts) and not block.file and "/  " not in text:
                commands_of_pages.append((f"{page.relative_to(ROOT)}:{block.line + i}", text))
    for number, line in enumerate(page.read_text().splitlines(), 1):
        commands_of_pages += [
            (f"{page.relative_to(ROOT)}:{number}", text)
            for text in re.findall(r"`([^`]+)`", line)
            if text.startswith(starts)
        ]
    return commands_of_pages


def words(command: str) -> list[str]:
    """As a shell would hand them on.  "rlsys compare A B     whether B is better" -> ["rlsys", "compare", "A", "B"]"""
    *command_words, last = re.split(r"\s{3,}", re.split(r"\s#", command)[0].strip())
    explained = command_words and " " in last and not re.match(r"-|[\w.]+=", last)  # a sentence, and not another option
    return shlex.split(" ".join(command_words if explained else [*command_words, last]))


def lay_out(folder: Path) -> Path:
    """The files that the pages show, beside our own."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "tests").symlink_to(ROOT / "tests")
    for block in (b for page in PAGES for b in blocks(page) if b.file):
        file = folder / block.file
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:  # a file may be shown in parts
            out.write(block.text)
    return folder
