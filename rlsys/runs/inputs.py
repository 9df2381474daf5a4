"""What a run is made of besides its options: files of models, functions of the user, and prepared rows. Compared on resume.

inputs.json   hashes of files, by option and file. Of weights it reads each tensor's header, beginning, middle and end: training or
              another precision changes all of them, and a change of single numbers elsewhere is not seen
rows.npz      a number for each row of each data set, in order
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlsys.config.cache import hub_cache
from rlsys.config.loading import flatten
from rlsys.config.schema import Config
from rlsys.data import Dataset, JoinedPrompts, PromptRows
from rlsys.data.prepare import hash_number, to_json
from rlsys.types import Prompt

USER_FILE = re.compile(r"(.+\.py):[A-Za-z_]\w*")
TEXT_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "chat_template*", "*.index.json", "*.py"),
)
WEIGHTS = ("*.safetensors", "*.bin")
BLOCK = 4096  # bytes
BLOCKS = 256  # of a file with weights in another format
Files = dict[str, str]  # hashes by name
Rows = NDArray[np.uint64]


class InputFiles(NamedTuple):
    files: dict[str, Files]  # by option
    matching: Set[str]  # options whose files are here, and as they were when the run began


# --- files -------------------------------------------------------------------------------------------------------------


def hash_inputs(config: Config, changeable: tuple[str, ...]) -> dict[str, Files]:
    """Returns hashes of the files that options lead to, where they are on this machine. `changeable`: options left out."""
    paths = {
        "model.path": config.model.path,
        "reference.path": config.reference.path,
        "model.adapter": config.model.adapter,
    }
    paths |= {f"models.{name}.path": model.path for name, model in config.models.items()}
    sets = [config.reward.functions, *(source.reward for source in config.data.train.values())]
    for f in (f for functions in sets for f in functions.values() if f.function == "model"):
        paths[f"the reward model {f.options.get('path')}"] = str(f.options.get("path") or "")
    inputs = {option: hash_model(folder) for option, path in paths.items() if (folder := find_model_folder(path))}
    values = [value for key, value in flatten(config).items() if not key.startswith(changeable)]
    names = sorted({match[1] for text in find_texts(values) if (match := USER_FILE.fullmatch(text))})
    inputs |= {name: {"contents": hash_file(file)} for name in names if (file := Path(name).expanduser()).is_file()}
    template = Path(config.data.template).expanduser()
    if (config.episode.play or config.episode.tools) and template.is_file():  # else the rows show it
        inputs["data.template"] = {"contents": hash_file(template)}
    return inputs


def find_model_folder(path: str) -> Path | None:
    """Returns the directory of a model, or the snapshot of a hub name that would be loaded; None if neither is here."""
    if not path or path.startswith("builtin:"):
        return None
    if (folder := Path(path).expanduser()).is_dir():
        return folder
    stored = hub_cache()[0] / f"models--{path.replace('/', '--')}"
    main = stored / "refs" / "main"
    snapshot = stored / "snapshots" / main.read_text().strip() if main.is_file() else None
    return snapshot if snapshot and snapshot.is_dir() else None


def hash_model(folder: Path) -> Files:
    texts = sorted({file for pattern in TEXT_FILES for file in folder.glob(pattern) if file.is_file()})
    weights = sorted({file for pattern in WEIGHTS for file in folder.glob(pattern) if file.is_file()} - set(texts))
    files = {file.name: hash_file(file) for file in texts} | {file.name: hash_weights(file) for file in weights}
    return files | ({"commit": folder.name} if folder.parent.name == "snapshots" else {})  # of the hub


def hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def hash_weights(file: Path) -> str:
    """Hashes size, header, and of each tensor the beginning, the middle and the end."""
    digest, size = hashlib.sha256(str(file.stat().st_size).encode()), file.stat().st_size
    with file.open("rb") as source:
        for start, end in tensor_places(file, size):
            for place in sorted({start, max(start, (start + end - BLOCK) // 2), max(start, end - BLOCK)}):
                source.seek(place)
                digest.update(source.read(min(BLOCK, end - place)))
    return digest.hexdigest()


def tensor_places(file: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yields where the header and each tensor of a safetensors file begin and end; of other files equal parts."""
    try:
        with file.open("rb") as source:
            first = 8 + int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(first - 8)) if first <= min(size, 100_000_000) else {}
        places = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
        assert places
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        part = max(BLOCK, size // BLOCKS)
        yield from ((start, min(size, start + part)) for start in range(0, size, part))
        return
    yield from ((start, min(first, start + BLOCK)) for start in range(0, first, BLOCK))
    yield from ((first + start, first + end) for start, end in places)


def find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for text in find_texts(list(pair)))
    elif isinstance(value, list | tuple):
        yield from (text for entry in value for text in find_texts(entry))


def describe_changed_files(before: Mapping[str, Files], now: Mapping[str, Files]) -> list[str]:
    """Names the files that are not as they were, of options that lead to files both times.

    Of a hub's model, a machine may have only some files, and more later; and another commit may have the same files.
    """
    changed = []
    for option in before.keys() & now.keys():
        old, new = before[option], now[option]
        compared = (
            old.keys() & new.keys() - {"commit"} if "commit" in old.keys() | new.keys() else old.keys() | new.keys()
        )
        names = [n for n in sorted(compared) if old.get(n) != new.get(n)]
        if names == ["contents"]:
            changed.append(f"{option} has changed")
        elif names:
            kinds = [n if n in old and n in new else f"{n} ({'removed' if n in old else 'added'})" for n in names]
            changed.append(f"{option}: {', '.join(kinds[:5])}{' and more' * (len(kinds) > 5)} changed")
    return sorted(changed)


# --- rows ----------------------------------------------------------------------------------------------------------------


def hash_rows(prompts: Any) -> Rows:
    """Returns a number for each prompt: of its text, its length in tokens, and all that rewards get.  [N]"""
    if isinstance(prompts, PromptRows):
        odd = np.uint64(0x9E3779B97F4A7C15)
        lengths = prompts.stored.lengths[prompts.chosen].astype(np.uint64)
        return (prompts.hashes * odd ^ prompts.text_hashes) * odd ^ lengths
    return np.array([hash_prompt(prompt) for prompt in prompts], np.uint64)


def hash_prompt(p: Prompt) -> int:
    return hash_number(to_json([p.source, p.text, [int(t) for t in p.tokens], p.row, p.messages]), 8)


def hash_training_rows(config: Config, train: Dataset) -> dict[str, Rows]:
    parts = train.prompts.parts if isinstance(train.prompts, JoinedPrompts) else [train.prompts]
    rows = {f"data.train.{name}": hash_rows(part) for name, part in zip(config.data.train, parts, strict=False)}
    order = [train.order(position) for position in range(min(len(train), 1000))]
    return rows | {"the order of the training prompts": np.array([i for i, _ in order], np.uint64)}


def describe_changed_rows(name: str, before: Rows, now: Rows) -> str:
    """Says how rows differ from what they were; empty if they do not."""
    if np.array_equal(before, now):
        return ""
    removed, added = (count_missing(*pair) for pair in ((before, now), (now, before)))
    if len(before) == len(now) and removed == added == int((before != now).sum()):
        return f"{name}: {removed:,} of {len(now):,} rows changed"
    if not removed and not added:
        return f"{name}: {int((before != now).sum()):,} of {len(now):,} rows are in another place"
    return f"{name}: {len(before):,} rows before, {len(now):,} now; {added:,} added, {removed:,} removed"


def count_missing(rows: Rows, others: Rows) -> int:
    """Returns how many of `rows` are not among `others`, which may repeat."""
    values, counts = np.unique(rows, return_counts=True)
    other_values, other_counts = np.unique(others, return_counts=True)
    present = dict(zip(other_values.tolist(), other_counts.tolist(), strict=True))
    return sum(max(0, n - present.get(v, 0)) for v, n in zip(values.tolist(), counts.tolist(), strict=True))
