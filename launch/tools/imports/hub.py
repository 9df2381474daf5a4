"""`rlsys import hf:NAME`: a model of the Hugging Face hub."""

import shutil
from pathlib import Path

from launch.tools.imports.text_model import keep_text_alone, require_trainable, takes_more_than_text
from launch.tools.imports.trained_directory import one_line, require_space
from rlsys.config.schema import ConfigError

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*"]  # no pickles
IGNORED = ["*/*"]  # other formats of the same model are in folders


def import_from_hub(name: str, folder: Path) -> list[str]:
    """Downloads weights, configuration, tokenizer and license into the folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    page = f"https://huggingface.co/{name}"
    try:
        files = snapshot_download(
            name, local_dir=folder, allow_patterns=PATTERNS, ignore_patterns=IGNORED, dry_run=True
        )
        require_weights(name, [file.filename for file in files])
        require_space(folder, sum(file.file_size or 0 for file in files))
        snapshot_download(name, local_dir=folder, allow_patterns=["config.json"])
        require_trainable(folder, name)
        snapshot_download(name, local_dir=folder, allow_patterns=PATTERNS, ignore_patterns=IGNORED)
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
    return [f"from {page}", *(keep_text_alone(folder) if takes_more_than_text(folder) else [])]


def require_weights(name: str, files: list[str]) -> None:
    for ending, meaning in ((".safetensors", "weights"), ("config.json", "configuration")):
        if not any(file.endswith(ending) for file in files):
            raise ConfigError(f"{name} has no {ending} file, so no {meaning} that can be read. Choose another model.")
