"""Waits for storage that may have stopped answering, a disk, a bucket or a hub: lines in the log, tries, a deadline."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lockstep.errors import ConfigError, HostTimeoutError, is_passing
from lockstep.printable import error_text, get_logger, without_credentials

log = get_logger(__name__)

LINE_S, REPEAT_S = 10.0, 60.0
"""Seconds of a wait until the log has a line of it, and between two lines."""
WAIT_S = 240.0  # seconds of all tries where the caller names no others: less than hosts wait for each other
TRY_S = 60.0  # seconds that one try of a read may take
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds between two tries: the first pause, and the longest of those that follow, each twice the one before."""
UNKNOWN_S = 10.0  # seconds of all tries where a machine's name has no address and nothing was read before
_UNKNOWN = re.compile(r"Name or service not known|nodename nor servname|Temporary failure in name resolution")
HUB_WAIT_S, HUB_PAUSE_S = 600.0, 5.0
"""The most seconds to wait for the Hugging Face hub, whose limits are for five minutes, and those of the first pause
where it does not say for how long."""

_answered = threading.Event()  # storage has answered this process once
_inside = threading.local()  # has ``attempt`` in the threads of tries: what they call is in the same wait


@contextlib.contextmanager
def storage_wait(doing: str) -> Iterator[None]:
    """Say in the log what storage is waited for and since when, where that takes long: after 10 s, then each minute.

    Args:
        doing: What is waited for, with its path or URL, such as "reading gs://bucket/data/metadata.json".
    """
    since, begin, ended = time.strftime("%H:%M:%S"), time.monotonic(), threading.Event()

    def tell() -> None:
        pause_s = LINE_S
        while not ended.wait(pause_s):
            log.warning("waiting for storage since %s (%.0f s): %s", since, time.monotonic() - begin, doing)
            pause_s = REPEAT_S

    threading.Thread(target=tell, name="lockstep-storage-wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def call_storage[Result](
    doing: str,
    work: Callable[[], Result],
    timeout_s: float | None = None,
    *,
    try_s: float | None = None,
    answers: Callable[[], bool] | None = None,
) -> Result:
    """Return what ``work`` returns; where storage does not answer, try again after a pause, until the time is over.

    The work is done in a thread, which is left behind where it hangs: no library has a limit for every call. Inside
    the work of another call it is done at once: that call waits.

    Args:
        doing: What is waited for, with its path or URL.
        work: A function that may be called several times, by two threads at once where the first call hangs.
        timeout_s: The seconds of all tries; None for `WAIT_S`.
        try_s: The seconds of one; None for `TRY_S`.
        answers: Whether storage answers, for work of any length that is not to be done twice at once: a try then has no
            limit, and ``timeout_s`` are those without an answer.

    Raises:
        HostTimeoutError: Storage did not answer in time, or failed each time.
        ConfigError: The Hugging Face hub has had too many requests, for longer than `HUB_WAIT_S`.
        Exception: What the work raised, where another try would meet it again.
    """
    if hasattr(_inside, "attempt"):
        return work()
    fix = "" if timeout_s is None else ", or raise trainer.distributed.timeout_s"
    timeout_s = WAIT_S if timeout_s is None else timeout_s
    begin, pause_s = time.monotonic(), FIRST_PAUSE_S
    deadline = begin + timeout_s
    hub_deadline, hub_pause_s = time.monotonic() + HUB_WAIT_S, HUB_PAUSE_S
    limit_s = min(TRY_S if try_s is None else try_s, timeout_s)
    with storage_wait(doing):
        attempt = _Attempt(work)
        while True:
            ended = attempt.done.wait(min(limit_s, max(0.0, deadline - time.monotonic())))
            if ended and attempt.error is None:
                _answered.set()
                return attempt.result[0]
            if ended and (refusal := _refusal_of_hub(attempt.error)) is not None:
                wait_s = _asked_to_wait(refusal) or hub_pause_s
                _wait_for_hub(doing, wait_s, hub_deadline, attempt.error)
                deadline, hub_pause_s = deadline + wait_s, min(2 * hub_pause_s, 60.0)
                attempt = _Attempt(work)
                continue
            if ended and attempt.error is not None and not is_passing(attempt.error):
                raise attempt.error
            failure = f"no answer for {limit_s:g} s" if attempt.error is None else error_text(attempt.error, 300)
            if _UNKNOWN.search(failure) and not _answered.is_set():  # no network, more likely than a fault of it
                timeout_s = min(timeout_s, UNKNOWN_S)
                deadline = begin + timeout_s
            waits_on = answers is not None and not ended
            if answers is not None and not ended and answers():
                deadline = time.monotonic() + timeout_s
            if time.monotonic() + (0.0 if waits_on else pause_s) >= deadline:
                raise HostTimeoutError(
                    f"storage did not answer within {timeout_s:g} s: {doing}; the last try: {failure}. Check the disk, "
                    f"or the network and the access to the bucket{fix}."
                ) from attempt.error
            if not waits_on:
                log.warning("storage failed, the next try is in %g s: %s: %s", pause_s, doing, failure)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                attempt = _Attempt(work)


class _Attempt[Result]:
    """A call in a thread of its own, which does not keep the interpreter alive."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.done = threading.Event()
        self.result: list[Result] = []
        self.error: Exception | None = None
        threading.Thread(target=self._run, args=(work,), name="lockstep-storage", daemon=True).start()

    def _run(self, work: Callable[[], Result]) -> None:
        _inside.attempt = self
        try:
            self.result.append(work())
        except Exception as error:
            self.error = error
        self.done.set()


def _wait_for_hub(doing: str, wait_s: float, deadline: float, error: Exception | None) -> None:
    """Wait as the Hugging Face hub asks, which its own client does for some requests, a few times."""
    if time.monotonic() + wait_s > deadline:
        raise ConfigError(
            f"the Hugging Face hub has had too many requests (429) while {doing}: {wait_s:g} s more are to be waited, "
            f"and this waits at most {HUB_WAIT_S:g} s in all. Set HF_TOKEN (with a token more are allowed), try again "
            "later, or copy the files to a directory or a bucket."
        ) from error
    log.warning("the Hugging Face hub has had too many requests (429) while %s: waiting %g s", doing, wait_s)
    time.sleep(wait_s)


def _refusal_of_hub(error: BaseException | None) -> Mapping[str, str] | None:
    """The headers of the reply 429 that an error comes from; None where it comes from something else."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if getattr(response, "status_code", None) == 429:
            return {name.lower(): value for name, value in dict(response.headers).items()}
        error = error.__cause__ or error.__context__
    return None


def _asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """The seconds that a reply 429 asks for: in ``Retry-After``, or until its limit counts anew (``RateLimit``)."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*", headers.get("retry-after", ""))
    match = match or re.search(r"\bt=(\d{1,6})\b", headers.get("ratelimit", ""))
    return float(match[1]) + 1.0 if match else None  # it may have rounded down


_READS = {
    "cat_file": "reading",
    "cat_ranges": "reading",
    "get_file": "copying",
    "ls": "listing",
    "glob": "listing",
    "find": "listing",
    "exists": "looking for",
    "isdir": "looking for",
    "info": "looking for",
    "size": "looking for",
}
"""The methods of a file system that are waited for, and what they do."""


_LOGINS = {
    "hf": "hf auth login, or HF_TOKEN",
    "gs": "gcloud auth application-default login",
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "abfs": "AZURE_STORAGE_CONNECTION_STRING",
}
"""Commands and variables that give access to the files of a protocol."""
_NO_ACCESS = re.compile(
    r"\w*CredentialsError|RefreshError|TokenRetrievalError|ProfileNotFound|PermissionError|GatedRepoError"
)
"""Errors of botocore, google.auth, s3fs and huggingface_hub."""


def unreachable(url: str, error: BaseException) -> ConfigError | None:
    """Return an error that says what to do, where access or a package is missing; None for any other error.

    Args:
        url: The URL that was asked for, without credentials.
    """
    name, text, protocol = type(error).__name__, error_text(error, 300), url.partition("://")[0]
    if isinstance(error, ImportError):
        fix = "Install the package that it names, or copy the files to a local directory."
    elif name in ("OfflineModeIsEnabled", "LocalEntryNotFoundError"):
        fix = "Unset HF_HUB_OFFLINE, or give a local directory (hf download NAME --local-dir DIRECTORY)."
    elif _NO_ACCESS.fullmatch(name) or (name == "OSError" and "Forbidden" in text):
        fix = f"Check the URL, and set up access ({_LOGINS.get(protocol, 'a public URL')})."
    else:
        return None
    return ConfigError(f"{url} cannot be read: {text.rstrip('.')}. {fix}")


def call_remote[Result](doing: str, url: str, work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns, by `call_storage`.

    Args:
        url: The URL that is read, without credentials.

    Raises:
        ConfigError: It cannot be had for want of access or a package (`unreachable`).
        Exception: As for `call_storage`.
    """
    try:
        return call_storage(f"{doing} {url}", work)
    except Exception as error:
        if (refusal := unreachable(url, error)) is not None:
            raise refusal from error
        raise


class RemoteFiles:
    """A file system of fsspec whose reads are waited for by `call_storage`; all else is its own.

    Args:
        filesystem: The file system of fsspec.

    Raises:
        ConfigError: A read has no access (`unreachable`).
    """

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as of an object that is being unpickled
            raise AttributeError(name)
        method = getattr(self._filesystem, name)
        if name not in _READS:
            return method

        def read(path: str | list[str], *arguments: Any, **options: Any) -> Any:
            return call_remote(_READS[name], self._url(path), lambda: method(path, *arguments, **options))

        return read

    def open(self, path: str, mode: str = "rb", *, compression: str | None = None, **options: Any) -> Any:
        """Open a file as fsspec does; where it is to be read, each block of it is waited for."""
        if mode != "rb":
            return self._filesystem.open(path, mode, compression=compression, **options)
        url = self._url(path)
        file = call_remote("opening", url, lambda: self._filesystem.open(path, mode, **options))
        if (cache := getattr(file, "cache", None)) is not None:
            fetch = cache.fetcher
            cache.fetcher = lambda start, end: call_remote("reading", url, lambda: fetch(start, end))
        if compression is None:
            return file
        from fsspec.compression import compr
        from fsspec.core import get_compression

        return compr[get_compression(path, compression)](file, mode="r")

    def _url(self, path: str | list[str]) -> str:
        first, *further = [path] if isinstance(path, str) else path
        more = f" and {len(further)} more" if further else ""
        return without_credentials(self._filesystem.unstrip_protocol(first)) + more
