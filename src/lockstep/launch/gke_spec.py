"""A job on GKE from the command line: its options, its name, its variables and its files."""

import argparse
import dataclasses
import gzip
import io
import re
import secrets
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.launch.environment import JobEnvironment, filter_files, job_environment, job_variables
from lockstep.launch.gke_manifest import FILES, MAX_PARTS, PART_BYTES, SYNCED, GkeJob, config_maps
from lockstep.launch.options import add_job_options, count
from lockstep.launch.record import JobRecord, name_from_date, new_record
from lockstep.launch.setup_vm import EXTRAS, PINS, ROOT, build_wheel, version_of, wheel_path
from lockstep.launch.slices import slice_of
from lockstep.launch.sync import make_archive

IMAGE = "python:3.12@sha256:dd4fe98ab39f91e936f8e7e7a65a3ce59ecfb11e32f9a125b3132779920ba7f7"
"""The default image: an index of every platform, as public repositories have pulled python:3.12 since 2026-08-13."""


def add_gke_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the backend."""
    add_job_options(parser)
    add = parser.add_argument_group("gke: a JobSet on a cluster").add_argument
    add("--tpu_type", metavar="TYPE", help="chip and size of a slice, for example v5p-64 or v6e-8; required")
    add("--slices", type=count, default=1, help="how many slices, joined over the data-centre network (default 1)")
    add("--capacity_type", choices=("on-demand", "spot", "reserved"), default="on-demand",
        help="which nodes may be used (default on-demand)")  # fmt: skip
    add("--reservation", default="", metavar="NAME", help="with --capacity_type reserved: the reservation")
    add("--context", default="", help="the context of kubectl's configuration (default: the current one)")
    add("--namespace", default="", help="the namespace (default: the context's)")
    add("--image", default=IMAGE,
        help="the container image, with Bash, tar and Python (default: python:3.12 as it was in August 2026, by its "
        "digest)")  # fmt: skip
    add("--privileged", action="store_true", help="privileged containers, as GKE before 1.28 wants them for TPUs")
    add("--setup", choices=("auto", "none"), default="auto",
        help="auto: install this checkout in every pod; none: the image has it")  # fmt: skip
    add("--extras", default=EXTRAS, help=f"optional dependencies to install (default {EXTRAS})")
    add("--service_account", default="", help="the Kubernetes service account, for buckets")
    add("--queue", default="", help="the Kueue queue")
    add("--grace_s", type=count, default=60, help="seconds between SIGTERM and SIGKILL (default 60)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeSpec:
    """A job before anything of it is created.

    Args:
        record: Its record, which is not written yet.
        job: What its objects are made of.
        wheel_name: The file name of the wheel; "": none is sent.
    """

    options: argparse.Namespace
    record: JobRecord
    job: GkeJob
    environment: JobEnvironment
    wheel_name: str

    @classmethod
    def of(cls, options: argparse.Namespace) -> "GkeSpec":
        """Read the options.

        Raises:
            ConfigError: They do not fit together.
            LaunchError: There is no checkout to install.
        """
        kind = slice_of(options.tpu_type)
        if kind is None:
            raise ConfigError("--tpu_type is not given; backend gke needs it. Add it: --tpu_type v6e-8")
        if bool(options.reservation) != (options.capacity_type == "reserved"):
            raise ConfigError("--reservation NAME and --capacity_type reserved belong together: give both, or neither.")
        record = new_record(options, options.name or name_from_date())
        record = dataclasses.replace(record, notes={"id": secrets.token_hex(8)})
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", record.name):
            raise ConfigError(
                f"--name is {record.name!r}; it must begin with a lower-case letter, have at most 40 lower-case "
                "letters, digits and '-', and not end with '-': Kubernetes makes the pods' host names of it."
            )
        environment = job_environment(options)
        wheel_name = wheel_path(ROOT, version_of()).name if options.setup == "auto" else ""
        extras = f"[{options.extras}]" if options.extras else ""
        files = [SYNCED] if options.sync else []
        files += [PINS, wheel_name] if wheel_name else []
        files += filter_files() if environment.secret else {}
        required = options.require_process_count or kind.hosts * options.slices
        job = GkeJob(
            name=record.name,
            id=record.notes["id"],
            slice=kind,
            slices=options.slices,
            command=options.command,
            image=options.image,
            environment={**job_variables(required), **environment.public},
            secret_names=list(environment.secret),
            files=files,
            requirement=f"{FILES}/{wheel_name}{extras}" if wheel_name else "",
            retries=options.retries,
            spot=options.capacity_type == "spot",
            reservation=options.reservation,
            queue=options.queue,
            service_account=options.service_account,
            grace_s=options.grace_s,
            privileged=options.privileged,
        )
        return cls(options=options, record=record, job=job, environment=environment, wheel_name=wheel_name)

    def with_files(self) -> tuple[GkeJob, list[dict[str, Any]], str]:
        """The job with the number of its ConfigMaps, these, and the sizes of the files in words.

        The wheel is built where it is not there yet.

        Raises:
            ConfigError: The files are too large.
            LaunchError: The wheel cannot be built.
        """
        found, warning = self._files()
        archive = pack(found) if found else b""
        sizes = ", ".join(f"{name} {len(data):,}" for name, data in found.items())
        if len(archive) > MAX_PARTS * PART_BYTES:
            raise ConfigError(
                f"the job's files have {len(archive):,} bytes ({sizes}); its ConfigMaps may have "
                f"{MAX_PARTS * PART_BYTES:,}. Leave data out of --sync and read it from a bucket, or put all into an "
                "image: --image NAME --setup none."
            )
        maps = config_maps(self.job, archive)
        words = f"{len(maps)} ConfigMap(s) with {sizes} bytes" if maps else ""
        return dataclasses.replace(self.job, parts=len(maps)), maps, "\n".join(filter(None, (warning, words)))

    def _files(self) -> tuple[dict[str, bytes], str]:
        """The files, as `GkeJob.files` names them, and what is to be said of those that were left out."""
        found: dict[str, bytes] = filter_files() if self.environment.secret else {}
        warning = ""
        if self.wheel_name:
            found[self.wheel_name] = build_wheel(ROOT, version_of()).read_bytes()
            found[PINS] = (ROOT / PINS).read_bytes()
        if self.options.sync:
            with tempfile.TemporaryDirectory(prefix="lockstep-sync-") as directory:
                archive = make_archive(self.options.sync, self.options.env_file, Path(directory) / SYNCED)
                found[SYNCED], warning = archive.path.read_bytes(), archive.warning()
        return found, warning


def pack(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar archive that is the same for the same files.

    Args:
        files: Their contents, by name.
    """
    target = io.BytesIO()
    with gzip.GzipFile(fileobj=target, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            tar.addfile(info, io.BytesIO(files[name]))
    return target.getvalue()
