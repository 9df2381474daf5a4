"""`rlsys import hf:NAME` or `hf:NAME@REVISION`: a model of the Hugging Face hub."""

import json
import shutil
from pathlib import Path
from typing import Any

from launch.tools.imports.text_model import keep_text_alone, require_trainable, takes_more_than_text
from launch.tools.imports.trained_directory import one_line, require_space
from rlsys.errors import ConfigError

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*"]  # no pickles
IGNORED = ["*/*"]  # other formats of the same model are in folders


def import_from_hub(name: str, folder: Path) -> list[str]:
    """Downloads weights, configuration, tokenizer and license of one commit, and writes which into origin.json."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = name.partition("@")
    page = f"https://huggingface.co/{name}"
    at: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        files = snapshot_download(
            name, local_dir=folder, allow_patterns=PATTERNS, ignore_patterns=IGNORED, dry_run=True, **at
        )
        require_weights(name, [file.filename for file in files])
        require_space(folder, sum(file.file_size or 0 for file in files))
        commit = next((file.commit_hash for file in files if hasattr(file, "commit_hash")), revision)
        at = {"revision": commit} if commit else {}  # all files of one commit, whatever is pushed meanwhile
        snapshot_download(name, local_dir=folder, allow_patterns=["config.json"], **at)
        require_trainable(folder, name)
        snapshot_download(name, local_dir=folder, allow_patterns=PATTERNS, ignore_patterns=IGNORED, **at)
    except RevisionNotFoundError:
        raise ConfigError(f"{name} has no revision {revision}. Look at {page}/commits/main") from None
    except GatedRepoError:
        raise ConfigError(f"{name} is gated. Accept its license at {page}, then log in: hf auth login") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(
            f"The hub has no model {name}, or it is private. Look at {page}, or log in: hf auth login"
        ) from None
    except ConfigError:
        raise
    except Exception as error:  # no network, a proxy, a broken transfer: its libraries raise errors of many kinds
        raise ConfigError(
            f"{name} cannot be downloaded: {type(error).__name__}: {one_line(error)} Try again, or download {page} on a "
            "machine with network, copy the directory here, and name it in model.path."
        ) from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    facts = keep_text_alone(folder) if takes_more_than_text(folder) else []
    (folder / "origin.json").write_text(json.dumps({"hub": name, "revision": commit or None}, indent=2) + "\n")
    return [f"from {page}, revision {commit or 'unknown'}", *facts]


def require_weights(name: str, files: list[str]) -> None:
    for ending, meaning in ((".safetensors", "weights"), ("config.json", "configuration")):
        if not any(file.endswith(ending) for file in files):
            raise ConfigError(f"{name} has no {ending} file, so no {meaning} that can be read. Choose another model.")
