"""The settings of doctor, what the run that it looks after needs, and whether that can be reached, each in a thread."""

import base64
import dataclasses
import functools
import importlib.util
import json
import netrc
import os
import re
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lockstep.config_fields import FilePath, check_fields
from lockstep.doctor.finding import BackgroundCheck, Finding
from lockstep.errors import ConfigError, LockstepError, check_at_least
from lockstep.hosts import digest
from lockstep.json_text import parse_json
from lockstep.models import check_hf, read_hf_config
from lockstep.printable import error_text
from lockstep.text import load_tokenizer
from lockstep.urls import files_of, read_http, url_to_fs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Settings of ``doctor``; ``--config_path`` and all other keys are those of the run that it looks after."""

    buckets: list[str] = dataclasses.field(default_factory=list)
    """Directories or URLs to write to, read from and delete in, beside those of the run's configuration."""
    json: FilePath | None = None
    """The file that the leader writes the report to; null: none."""
    calibrate: FilePath | None = None
    """The file that every process writes the measured numbers of the devices to, for ``lockstep plan --calibration``
    and the key ``calibration``; null: none."""
    self_test: bool = False
    """Train a small model with and without samples, in every layout and with a failure on one host. ``--self-test``
    does the same."""
    self_test_s: float = 300.0
    """Seconds after which the self-test begins no other layout."""
    measure: bool = True
    """Measure memory bandwidth, operations and all-reduces, which launches programs on all devices."""
    timeout_s: float = 120.0
    """Seconds that the processes may take to find each other, and that any wait or device call may last."""
    reach_s: float = 15.0
    """Seconds that buckets, W&B and the tokenizer may take to answer."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, 0, "self_test_s", "timeout_s", "reach_s", fix=" seconds. Leave it out.", above=True)
        if self.calibrate is not None and not self.measure:
            raise ConfigError(
                "calibrate is given and measure is false, so there is nothing to write. Leave measure out."
            )


WRITTEN: Final = frozenset(
    "base_path cache_dir hf_save_path peft_save_path merged_hf_save_path logdir output output_dir "
    "host_data_parallel_output_dir".split()
)
"""The keys of a configuration that name a place to write to."""
READ: Final = re.compile(
    r"url|(\w+_)?urls|\w*(checkpoint|model|adapter)_path|prompts|task_dir|tokenizer|base_model|hf_checkpoint|"
    r"initialize_from_hf"
)
"""The keys of a configuration that name what is read; a URL under a key that is in neither is a text or a service."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """The services, files and devices that a run uses."""

    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()  # the URLs that it reads, which may have wildcards
    tokenizer: str | None = None
    trust_remote_code: str | None = None  # the tokenizer whose code may be run; None where none is
    checkpoint: str | None = None
    wandb: Mapping[str, Any] | None = None
    mesh_shape: str = "auto"
    log_dir: str = "runs"
    distributed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config_digest: str = "none"  # a digest of the configuration but for `distributed`; `none` where there is none


def read_needs(config: DoctorConfig, values: Mapping[str, Any]) -> RunNeeds:
    """Read what a run reaches for from its configuration."""
    trainer = _mapping(values.get("trainer"))
    trackers = trainer.get("tracker", values.get("tracker"))
    tracker_blocks = [_mapping(block) for block in (trackers if isinstance(trackers, list) else [trackers])]
    urls = [(key, text) for key, text in _texts(values) if re.match(r"\w+://", text)]
    distributed = _mapping(trainer.get("distributed", values.get("distributed")))
    checkpoint = values.get("initialize_from_hf", values.get("hf_checkpoint"))
    tokenizer = values.get("tokenizer") or values.get("hf_checkpoint")  # the one beside it
    # A tokenizer and a checkpoint are looked at by their own readers.
    own = (tokenizer, checkpoint)
    read = [text for key, text in urls if READ.fullmatch(key) and text not in own]
    return RunNeeds(
        written=tuple(dict.fromkeys([*config.buckets, *(text for key, text in urls if key in WRITTEN)])),
        read=tuple(dict.fromkeys(read)),
        tokenizer=tokenizer if isinstance(tokenizer, str) else None,
        trust_remote_code=values.get("trust_remote_code"),
        checkpoint=checkpoint if isinstance(checkpoint, str) else None,
        wandb=next((block for block in tracker_blocks if block.get("type") == "wandb"), None),
        mesh_shape=str(trainer.get("mesh_shape", "auto")),
        log_dir=os.path.expanduser(str(trainer.get("log_dir", "runs"))),
        distributed=distributed,
        config_digest=digest(repr(_without_distributed(values))) if values else "none",
    )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a configuration but prompts that are written out in it, with the key that it is under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "prompts" or isinstance(inner, str):
                yield from _texts(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)


def _without_distributed(value: Any) -> Any:
    """A configuration without what tells each process its own number."""
    if isinstance(value, Mapping):
        return {name: _without_distributed(inner) for name, inner in value.items() if name != "distributed"}
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


NETWORK: Final = "Look at the network, a proxy, the name and the access rights, or raise reach_s."
WANDB_URL: Final = "https://api.wandb.ai"
VIEWER: Final = "query Viewer { viewer { username entity } }"
"""The question that W&B's own client asks first: who the key belongs to."""


def begin_checks(needs: RunNeeds) -> list[BackgroundCheck]:
    """Begin to look at everything that every host reaches for."""
    checks = {f"bucket {url}": functools.partial(check_written, url) for url in needs.written}
    checks |= {f"data {url}": functools.partial(check_read, url) for url in needs.read}
    if needs.tokenizer is not None:
        checks["tokenizer"] = functools.partial(check_tokenizer, needs.tokenizer, needs.trust_remote_code)
    if needs.checkpoint is not None:
        checks["checkpoint"] = functools.partial(check_checkpoint, needs.checkpoint)
    return [BackgroundCheck(name, check, NETWORK) for name, check in checks.items()]


def check_written(url: str) -> Finding:
    """Write a small file to a directory or URL, read it, and delete it."""
    name = f"bucket {url}"
    content, doing = b"lockstep doctor", "writing to"
    try:
        filesystem, root = url_to_fs(url)
        path = f"{root.rstrip('/')}/.lockstep-doctor-{uuid.uuid4().hex}"
        filesystem.makedirs(root, exist_ok=True)
        filesystem.pipe_file(path, content)
        doing = "reading from"
        same = filesystem.cat_file(path) == content
        doing = "deleting in"
        filesystem.rm_file(path)
    except Exception as error:  # each filesystem has its own kinds
        return Finding.to_fix(name, f"{doing} it failed: {_text(error)}", _access(url))
    if not same:
        return Finding.to_fix(name, "what was read is not what was written.", "Choose another place.")
    return Finding.ok(name, "written, read and deleted")


def check_read(url: str) -> Finding:
    """Look whether a URL, or anything that its wildcards mean, is there."""
    name = f"data {url}"
    try:
        filesystem, path = url_to_fs(url)
        names = files_of(filesystem, path)
    except Exception as error:
        return Finding.to_fix(name, f"looking for it failed: {_text(error)}", _access(url))
    if not names:
        return Finding.to_fix(name, "there is nothing of this name.", "Correct the URL, or upload the files.")
    return Finding.ok(name, f"{len(names)} file{'s' * (len(names) != 1)} or directories of this name")


def check_tokenizer(name: str, trust_remote_code: str | None = None) -> Finding:
    """Load a tokenizer as a run does."""
    try:
        tokenizer = load_tokenizer(name, trust_remote_code)
    except LockstepError as error:
        accept = "For a gated model, accept its licence on its page"
        if os.environ.get("HF_TOKEN"):
            return Finding.to_fix("tokenizer", str(error), f"{accept} with the account that HF_TOKEN belongs to.")
        return Finding.to_fix("tokenizer", str(error), f"{accept} and set HF_TOKEN; or give a local directory.")
    return Finding.ok("tokenizer", f"{name}: {type(tokenizer).__name__} of {len(tokenizer)} token ids")


def check_checkpoint(name: str) -> Finding:
    """Check a checkpoint as a run does, by its ``config.json`` and the headers of its files; no weight is read."""
    try:
        values = read_hf_config(name)
        check_hf(name)
    except LockstepError as error:
        return Finding.to_fix("checkpoint", str(error))
    return Finding.ok("checkpoint", f"{name}: {values.get('model_type', 'unknown type')}")


def check_wandb(settings: Mapping[str, Any], timeout_s: float) -> Finding:
    """Ask W&B whose key this is."""
    if importlib.util.find_spec("wandb") is None:
        return Finding.to_fix("W&B", "the package wandb is not installed.", "pip install 'jax-lockstep[wandb]'")
    mode = settings.get("mode") or os.environ.get("WANDB_MODE") or "online"
    if mode != "online":
        return Finding.ok("W&B", f"not asked: mode {mode}")
    url = os.environ.get("WANDB_BASE_URL", WANDB_URL).rstrip("/")
    login = f"A valid key is at {'https://wandb.ai' if url == WANDB_URL else url}/authorize: put it into WANDB_API_KEY "
    login += "or run `wandb login`; or set tracker.mode: offline."
    key = os.environ.get("WANDB_API_KEY") or _netrc_key(url)
    if not key:
        return Finding.to_fix("W&B", "there is no key: WANDB_API_KEY is not set, ~/.netrc has none.", login)
    request = urllib.request.Request(
        f"{url}/graphql",
        data=json.dumps({"query": VIEWER}).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": "Basic " + base64.b64encode(f"api:{key}".encode()).decode(),
        },
    )
    try:
        answer = parse_json(read_http(request, timeout_s), "its answer", dict, "").get("data")
        viewer = answer.get("viewer") if isinstance(answer, dict) else None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return Finding.to_fix("W&B", f"{url} refuses the key ({error.code}).", login)
        return Finding.to_fix("W&B", f"{url} answers {error.code}: {error.reason}.", NETWORK)
    except (OSError, ValueError) as error:
        offline = "Look at the network and at WANDB_BASE_URL, or set tracker.mode: offline and upload later."
        return Finding.to_fix("W&B", f"{url} does not answer: {_text(error)}", offline)
    if not isinstance(viewer, dict):
        return Finding.to_fix("W&B", f"{url} does not know the key.", login)
    return Finding.ok("W&B", f"{url} answers; logged in as {viewer.get('username')}")


def _netrc_key(url: str) -> str | None:
    try:
        login = netrc.netrc().authenticators(urllib.parse.urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return None if login is None else login[2]


def _access(url: str) -> str:
    protocol = url.partition("://")[0] if "://" in url else ""
    if protocol in ("gs", "gcs"):
        return (
            "Give the service account of the workers the role Storage Object Admin on the bucket; on a machine of "
            "yours, run gcloud auth application-default login. The package gcsfs (extra [gcs]) must be installed."
        )
    return "Check the name, the network, the credentials and the access rights."


def _text(error: BaseException) -> str:
    return " ".join(error_text(error, 500).split())
