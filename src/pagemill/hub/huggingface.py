"""Fetches Hugging Face ids: `org/name` for a folder of safetensors, `org/name:file.gguf` for one GGUF file.

Only configuration, tokenizer and weights are fetched, never code or pickles. Files live in huggingface_hub's own cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemill.errors import ModelNotFoundError, PullError

_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+\.gguf)?")
_TIMEOUT_S = 10.0
_SIDE_FILES = re.compile(r"[\w.-]+\.(json|jinja|model)|merges\.txt|vocab\.txt|additional_chat_templates/[\w.-]+\.jinja")
_WEIGHTS = re.compile(r"model[\w.-]*\.safetensors")
_INDEX = "model.safetensors.index.json"


def is_hub_id(name: str) -> bool:
    """Returns whether a name has the form of an id. The module's other functions take only such names."""
    return (
        _ID.fullmatch(name) is not None
        and not name.startswith((".", "~"))
        and (":" in name or not name.endswith(".gguf"))
    )


def cached(name: str) -> Path | None:
    """Returns an id's folder or GGUF file in the local cache, or None if it is not complete. Uses no network."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    repo, _, file = name.partition(":")
    # The cache's documented layout: snapshot_download(local_files_only=True) takes a snapshot for incomplete if files
    # were left out on purpose (in 2.4.0), and for complete if a shard is missing (in 1.0.0 and 2.4.0).
    root = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    ref = root / "refs" / "main"
    if not ref.is_file():
        return None
    folder = root / "snapshots" / ref.read_text().strip()
    if file:
        return folder / file if (folder / file).is_file() else None
    if is_complete(folder):
        return folder
    ggufs = list(folder.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 else None


def pull(name: str) -> Path:
    """Downloads an id into the cache, from where an interrupted download stopped. Returns its folder or GGUF file.

    Raises ModelNotFoundError for an id that does not exist or is not a model pagemill can read, PullError if the hub
    cannot be reached or refuses.
    """
    from huggingface_hub import HfApi, snapshot_download

    repo, _, file = name.partition(":")
    with _fetching(repo):
        siblings = HfApi().model_info(repo, timeout=_TIMEOUT_S).siblings or []
        wanted = _choose(repo, file, [sibling.rfilename for sibling in siblings])
        folder = Path(snapshot_download(repo, allow_patterns=wanted, etag_timeout=_TIMEOUT_S))
    ggufs = [folder / path for path in wanted if path.endswith(".gguf")]
    return ggufs[0] if ggufs else folder


def pull_config(name: str) -> Path:
    """Downloads an id's config.json alone, a few kB, unless the cache has it. Returns its folder.

    Raises as `pull` does, and ModelNotFoundError for an id of GGUF files, which have their configuration in them.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    repo, _, file = name.partition(":")
    if not file and isinstance(kept := try_to_load_from_cache(repo, "config.json"), str):
        return Path(kept).parent
    with _fetching(repo):
        siblings = HfApi().model_info(repo, timeout=_TIMEOUT_S).siblings or []
        if not file and any(sibling.rfilename == "config.json" for sibling in siblings):
            return Path(hf_hub_download(repo, "config.json", etag_timeout=_TIMEOUT_S)).parent
        raise ModelNotFoundError(
            f"{name} has no config.json, so its sizes stand in its weights alone; fetch it first: pagemill pull {name}",
            param="model",
        )


@contextmanager
def _fetching(repo: str) -> Iterator[None]:
    """Raises what keeps a repository from being fetched as `pull` says it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise PullError(
            f"{repo} asks you to accept its terms ({constants.ENDPOINT}/{repo}); do so, then log in with: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{constants.ENDPOINT} has no model {repo!r} that you may see; check the id, or log in with: hf auth login",
            param="model",
        ) from error
    except ModelNotFoundError:
        raise
    except Exception as error:  # the HTTP library below huggingface_hub, and so its errors, changes between versions
        first_line = (str(error).splitlines() or [""])[0]
        raise PullError(
            f"could not fetch {repo} from {constants.ENDPOINT} ({type(error).__name__}: {first_line}); check the "
            "network, set HF_ENDPOINT to a mirror, or copy the model's folder here and give its path"
        ) from error


def _choose(repo: str, file: str, files: list[str]) -> list[str]:
    """Returns which files of a repository to fetch: the weights in one form, and all that describes them.

    file: the one that the id names, or "".
    """
    side = [path for path in files if _SIDE_FILES.fullmatch(path)]
    ggufs = sorted(path for path in files if path.endswith(".gguf"))
    if file:
        if file not in ggufs:
            raise ModelNotFoundError(
                f"{repo} has no file {file!r}; it has: {', '.join(ggufs) or 'no GGUF file'}", param="model"
            )
        return [file]
    weights = [path for path in files if _WEIGHTS.fullmatch(path)]
    if weights:
        return side + weights
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelNotFoundError(
            f"{repo} has {len(ggufs)} GGUF files; name one, as in {repo}:{ggufs[0]}. They are: {', '.join(ggufs)}",
            param="model",
        )
    raise ModelNotFoundError(
        f"{repo} has neither safetensors nor GGUF weights, and pagemill reads only these", param="model"
    )


def is_complete(folder: Path) -> bool:
    """Returns whether a folder has a configuration and all weights that its index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / _INDEX
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # it is damaged
            return False
        return all((folder / shard).is_file() for shard in shards)
    return (folder / "model.safetensors").is_file()
