"""Rows behind a URL, which outlive this machine's disk."""

import os
import uuid
from pathlib import Path

from lockstep.batch_inference.manifest import NAME
from lockstep.batch_inference.row_files import PATTERN, host_name
from lockstep.urls import url_to_fs


class RemoteRows:
    """An output directory behind a URL. The hosts work on local files; what they add to them is uploaded as they go.

    Object stores cannot append, so each batch of a host is an object of its own. It appears whole or not at all: a
    process that is killed leaves no torn line there.

    Args:
        url: The URL of the directory, such as ``gs://bucket/rows``.
        host: The number of this process.
    """

    def __init__(self, url: str, host: int) -> None:
        self.url = url.rstrip("/")
        self._filesystem, root = url_to_fs(self.url)
        self._root, self._host = root.rstrip("/"), host
        # Unique, so that no two processes write the same object, also where a run is started again.
        self._name, self._batches = f"{host_name(host)}-{uuid.uuid4().hex[:8]}", 0

    def fetch(self, directory: Path, hosts: int) -> None:
        """Copy what earlier runs left: the job's manifest, and this host's part of all rows in one file.

        Args:
            directory: The directory of this host's files.
            hosts: The number of hosts; the objects are dealt out to them in turns.
        """
        self._filesystem.invalidate_cache()
        objects = sorted(self._filesystem.glob(f"{self._root}/{PATTERN}"))
        if own := objects[self._host :: hosts]:
            temporary = directory / f".found.{self._host}.tmp"
            with open(temporary, "wb") as file:
                for each in own:
                    file.write(self._filesystem.cat_file(each))
            os.replace(temporary, directory / f"{host_name(self._host)}-found.jsonl")
        if self._filesystem.exists(f"{self._root}/{NAME}"):
            temporary = directory / f".{NAME}.{self._host}.tmp"
            temporary.write_bytes(self._filesystem.cat_file(f"{self._root}/{NAME}"))
            os.replace(temporary, directory / NAME)

    def add(self, lines: bytes) -> None:
        """Upload a batch of rows; when this returns they are there."""
        self._filesystem.pipe_file(f"{self._root}/{self._name}-{self._batches:06d}.jsonl", lines)
        self._batches += 1

    def put(self, path: Path) -> None:
        """Upload a file under its name."""
        self._filesystem.put_file(str(path), f"{self._root}/{path.name}")
