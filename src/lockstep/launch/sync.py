"""The files of ``--sync``, in one archive that is the same for the same files."""

import dataclasses
import fnmatch
import gzip
import hashlib
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.plugins import modules_beside

LEFT_OUT = {".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
"""Directories that are not copied where git does not say what is."""
CREDENTIALS = (
    ".env*", ".netrc", "_netrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", ".git-credentials", ".pypirc", ".npmrc",
    ".boto", ".s3cfg", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "credentials.db",
    "access_tokens.db", "application_default_credentials.json", "adc.json", "client_secret*.json", "kaggle.json",
    ".pgpass", ".my.cnf", ".ssh", ".aws", ".azure", ".gcloud", ".gnupg", ".kube", ".kaggle",
)  # fmt: skip
"""Names of files and directories with keys and passwords, which are never copied."""
CREDENTIAL_PATHS = (
    ".config/gcloud",
    ".docker/config.json",
    "huggingface/token",
    ".huggingface/token",
    "wandb/settings",
)
"""The same, by more than one part of a path."""
SHOWN = 8  # files that a warning names
KEY_BYTES = 1 << 14  # no key file is larger: what is, is not looked into


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive:
    """Files to copy."""

    path: Path  # the archive: tar, gzip
    digest: str  # the digest of names, modes and contents
    count: int
    size: int  # their bytes, unpacked
    left_out: Sequence[str] = ()  # files that look like keys or passwords, which are not in it

    def warning(self) -> str:
        """The sentence that names the files that were left out; "": there are none."""
        if not self.left_out:
            return ""
        more = f" and {len(self.left_out) - SHOWN} more" if len(self.left_out) > SHOWN else ""
        return (
            f"--sync leaves out what looks like keys or passwords: {', '.join(self.left_out[:SHOWN])}{more}. Give the "
            "job its secrets with --env_file; a file that holds none needs another name."
        )


def make_archive(paths: Sequence[str], secret: Path | None, target: Path) -> Archive:
    """Write the archive of files and directories below the present one.

    Args:
        secret: The file of ``--env_file``, which must not be among them.

    Raises:
        ConfigError: One is not there, not below the present directory, or is the file of secrets; or a link leads out
            of the directory.
    """
    listed = sorted({name for path in paths for name in files_of(path)})
    left_out = [name for name in listed if is_credential(name)]
    names = sorted(set(listed) - set(left_out))
    if secret is not None and secret.resolve() in {Path(name).resolve() for name in names}:
        raise ConfigError(
            f"--env_file {secret} is among the files of --sync {' '.join(paths)}, so its secrets would lie on every "
            "worker. Keep it elsewhere, or have git ignore it."
        )
    for name in names:
        _check_link(name)
    digest, size = hashlib.sha256(), 0
    with gzip.GzipFile(target, "wb", compresslevel=3, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            info = tar.gettarinfo(name)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.islnk():  # a second name of a file: it is a file of its own there
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", os.path.getsize(name)
            if info.isreg():
                with open(name, "rb") as file:
                    digest.update(f"{name}\0{info.mode}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
                    file.seek(0)
                    tar.addfile(info, file)
                size += info.size
            elif info.issym():
                digest.update(f"{name}\0->{info.linkname}\0".encode())
                tar.addfile(info)
    return Archive(path=target, digest=digest.hexdigest(), count=len(names), size=size, left_out=left_out)


def is_credential(name: str) -> bool:
    """Whether a file is one of keys or passwords, by its name or by what is in it."""
    parts = name.split(os.sep)
    if any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in CREDENTIALS):
        return True
    if any(f"/{path}/" in f"/{'/'.join(parts)}/" for path in CREDENTIAL_PATHS):
        return True
    # A link to a key is one too: what it leads to may be copied under the link's name one day.
    if os.path.islink(name):
        parts = os.readlink(name).split(os.sep)
        return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in CREDENTIALS)
    if not os.path.isfile(name) or os.path.getsize(name) > KEY_BYTES:
        return False
    content = Path(name).read_bytes().lstrip()
    # Keys of ssh and TLS begin so; the key of a cloud's service account is a JSON object with one in it, and what its
    # users log in with has one of the others.
    is_key = content.startswith(b"-----BEGIN") and b"PRIVATE KEY-----" in content.partition(b"\n")[0]
    named = b'"private_key"' in content and b"-----BEGIN" in content
    named = named or re.search(rb'"(refresh_token|client_secret)"\s*:\s*"[^"]', content) is not None
    return is_key or (content.startswith(b"{") and named)


def _check_link(name: str) -> None:
    """Refuse a link that workers would refuse, or that would lead somewhere else there."""
    if not os.path.islink(name):
        return
    target = os.readlink(name)
    inside = os.path.normpath(os.path.join(os.path.dirname(name), target))
    if os.path.isabs(target) or inside == os.pardir or inside.startswith(os.pardir + os.sep):
        raise ConfigError(
            f"--sync: {name} is a link to {target}, which is outside of {os.getcwd()} and not on the workers. Put the "
            "file itself there, link to it by a relative path, or have git ignore the link."
        )


def check_configuration(command: Sequence[str], paths: Sequence[str], workdir: str | None) -> None:
    """Refuse a command whose configuration is a file of this machine that the workers would not have.

    Args:
        workdir: What ``--workdir`` names, where the workers may have the file; None where the launcher chooses.

    Raises:
        ConfigError: ``--config_path`` names a file below the present directory that is not copied.
    """
    for path in _configurations(command) if workdir is None else ():
        relative = os.path.relpath(path)
        if relative not in {name for synced in paths for name in files_of(synced)}:
            folder = os.path.dirname(relative) or relative
            raise ConfigError(
                f"--config_path {path} is a file of this machine, and the workers would not find it. Add --sync "
                f"{folder}, which copies it to them; or, where they have it already, say where: --workdir DIR."
            )


def modules_of_configuration(command: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the modules beside a command's configuration that it names and ``--sync`` does not bring yet."""
    modules: list[str] = []
    for path in _configurations(command):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        modules += map(os.path.relpath, modules_beside(path, " ".join((text, *command))))
    copied = {name for synced in paths if modules for name in files_of(synced)}
    return [module for module in modules if not copied.issuperset(files_of(module))]


def _configurations(command: Sequence[str]) -> list[str]:
    """The files below the present directory that a command is given as its configuration, as it names them."""
    words = [word for argument in command for word in argument.split("=", 1)]
    paths = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--config_path", "--config-path")]
    return [
        path
        for path in paths
        if not (os.path.isabs(path) or os.path.relpath(path).startswith("..")) and os.path.isfile(path)
    ]


def files_of(name: str) -> Iterator[str]:
    """The files of one ``--sync``, relative to the present directory."""
    path = os.path.relpath(name)
    if path.startswith(".."):
        raise ConfigError(f"--sync {name} is not below {os.getcwd()}. Start the launcher in a directory above it.")
    if os.path.isfile(path):
        return iter([path])
    if not os.path.isdir(path):
        raise ConfigError(f"--sync {name}: there is no such file or directory in {os.getcwd()}.")
    listed = _files_of_git(path)
    return iter(listed if listed is not None else _files_below(path))


def _files_of_git(path: str) -> list[str] | None:
    """The files that git has or does not ignore, and of repositories within; None where it has nothing to say."""
    listed = _listed_by_git(path)
    if not listed:
        return None
    files: list[str] = []
    for name in listed:
        if name == path:  # a submodule that was not fetched
            files += _files_below(name)
        elif os.path.isdir(name) and not os.path.islink(name):  # a submodule, or a clone that git does not ignore
            files += files_of(name)
        elif os.path.lexists(name):
            files.append(name)
    return files


def _listed_by_git(path: str) -> list[str]:
    """The files below a directory that git lists, by the repository's ``.gitignore`` files and its index.

    Nothing of its configuration is read, for it may be somebody else's: ``core.fsmonitor`` in it is a command that git
    runs. So git looks at the files from an empty repository.
    """
    folder = Path(path).absolute()
    root = next((parent for parent in (folder, *folder.parents) if os.path.lexists(parent / ".git")), None)
    if root is None:
        return []
    index, exclude = root / ".git" / "index", root / ".git" / "info" / "exclude"
    words = ["git", "-c", "core.bare=false", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    words += [f"--exclude-from={exclude}"] if _is_plain(exclude) else []
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with tempfile.TemporaryDirectory(prefix="lockstep-git-") as empty:
        variables = {**plain, "GIT_DIR": empty, "GIT_WORK_TREE": str(root)}
        # An index that refers to more than itself (split, sparse, SHA-256) is left out.
        for indexed in ([{"GIT_INDEX_FILE": str(index)}] if _is_plain(index) else []) + [{}]:
            try:
                subprocess.run(["git", "init", "--quiet", "--bare", "--template=", empty], check=True, env=plain)
                done = subprocess.run(words, capture_output=True, cwd=path, env=variables | indexed)
            except (FileNotFoundError, subprocess.CalledProcessError):
                return []
            if done.returncode == 0:
                names = (os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
                return [os.path.normpath(os.path.join(path, name)) for name in names]
    return []


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _files_below(path: str) -> Iterator[str]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        yield from (os.path.relpath(os.path.join(folder, name)) for name in names)
