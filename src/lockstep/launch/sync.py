"""The files of ``--sync``, in one archive that is the same for the same files."""

import dataclasses
import gzip
import hashlib
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.errors import ConfigError

LEFT_OUT = {".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
"""Directories that are not copied where git does not say what is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive:
    """Files to copy.

    Args:
        path: The archive: tar, gzip.
        digest: The digest of names, modes and contents.
        count: How many files are in it.
        size: Their bytes, unpacked.
    """

    path: Path
    digest: str
    count: int
    size: int


def make_archive(given: Sequence[str], secret: Path | None, target: Path) -> Archive:
    """Write the archive of files and directories below the present one.

    Args:
        given: What ``--sync`` names.
        secret: The file of ``--env_file``, which must not be among them.
        target: The archive to write.

    Raises:
        ConfigError: One is not there, not below the present directory, or is the file of secrets.
    """
    names = sorted({name for each in given for name in files_of(each)})
    if secret is not None and secret.resolve() in {Path(name).resolve() for name in names}:
        raise ConfigError(
            f"--env_file {secret} is among the files of --sync {' '.join(given)}, so its secrets would lie on every "
            "worker. Keep it elsewhere, or have git ignore it."
        )
    digest, size = hashlib.sha256(), 0
    with gzip.GzipFile(target, "wb", compresslevel=3, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            info = tar.gettarinfo(name)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.isreg():
                with open(name, "rb") as file:
                    digest.update(f"{name}\0{info.mode}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
                    file.seek(0)
                    tar.addfile(info, file)
                size += info.size
            elif info.issym():
                digest.update(f"{name}\0->{info.linkname}\0".encode())
                tar.addfile(info)
    return Archive(path=target, digest=digest.hexdigest(), count=len(names), size=size)


def check_configuration(command: Sequence[str], given: Sequence[str], workdir: str | None) -> None:
    """Refuse a command whose configuration is a file of this machine that the workers would not have.

    Args:
        command: The command that runs on the workers.
        given: What ``--sync`` names.
        workdir: What ``--workdir`` names, where the workers may have the file; None where the launcher chooses.

    Raises:
        ConfigError: ``--config_path`` names a file below the present directory that is not copied.
    """
    words = [word for each in command for word in each.split("=", 1)]
    paths = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--config_path", "--config-path")]
    for path in paths:
        relative = os.path.relpath(path)
        if workdir is not None or os.path.isabs(path) or relative.startswith("..") or not os.path.isfile(relative):
            continue
        if relative not in {name for each in given for name in files_of(each)}:
            folder = os.path.dirname(relative) or relative
            raise ConfigError(
                f"--config_path {path} is a file of this machine, and the workers would not find it. Add --sync "
                f"{folder}, which copies it to them; or, where they have it already, say where: --workdir DIR."
            )


def files_of(given: str) -> Iterator[str]:
    """The files of one ``--sync``, relative to the present directory.

    Args:
        given: A file or a directory.

    Raises:
        ConfigError: It is not there, or not below the present directory.
    """
    path = os.path.relpath(given)
    if path.startswith(".."):
        raise ConfigError(f"--sync {given} is not below {os.getcwd()}. Start the launcher in a directory above it.")
    if os.path.isfile(path):
        return iter([path])
    if not os.path.isdir(path):
        raise ConfigError(f"--sync {given}: there is no such file or directory in {os.getcwd()}.")
    listed = _files_of_git(path)
    return iter(listed if listed is not None else _files_below(path))


def _files_of_git(path: str) -> list[str] | None:
    """What git has or does not ignore; None where it has nothing to say."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", path]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    return [name for name in names if os.path.lexists(name)] if done.returncode == 0 and names else None


def _files_below(path: str) -> Iterator[str]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        yield from (os.path.relpath(os.path.join(folder, name)) for name in names)
