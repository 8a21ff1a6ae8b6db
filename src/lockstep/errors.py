"""Every error that lockstep raises on purpose: what was given, the limit, and what to change; and which are faults."""

import dataclasses
import functools
import operator
import os
import re
import typing

from lockstep.files import check_file


class LockstepError(Exception):
    """Base of all errors that lockstep raises on purpose.

    Example:
        >>> try:
        ...     lockstep.InferenceEvalConfig(prompts=[])
        ... except lockstep.LockstepError as error:
        ...     print(type(error).__name__)
        PromptError
    """


class ConfigError(LockstepError, ValueError):
    """A configuration value that cannot work: the message names the field, the value, the limit and the fix.

    Example:
        >>> lockstep.InferenceEvalConfig(prompts=["2 + 2 ="], eval_every=0)
        Traceback (most recent call last):
            ...
        lockstep.errors.ConfigError: inference_eval.eval_every is 0; it must be at least 1...
    """


def refuse_keys(config: typing.Any, command: str, block: str = "") -> None:
    """Refuse the keys that a configuration shares with other commands and that have no effect in its own.

    Args:
        config: A dataclass with ``REFUSED``: each such key, relative to the class, and what to do instead. They are in
            no table of the command's keys.
        command: The word after ``lockstep``.
        block: The key of the configuration itself, with a dot at its end; "" for that of a command.

    Raises:
        ConfigError: One has another value than its default.
    """
    for key, instead in config.REFUSED.items():
        *blocks, name = key.split(".")
        owner = functools.reduce(getattr, blocks, config)
        value, default = getattr(owner, name), next(x.default for x in dataclasses.fields(owner) if x.name == name)
        if value != default:
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{block}{key} is {shown}, which has no effect in {command}. {instead}")


def check_at_least(
    config: object,
    least: float,
    *names: str,
    block: str = "",
    fix: str = ". Raise it.",
    above: bool = False,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Refuse fields of a configuration that are out of a range; None is no number, and is left to others.

    Args:
        block: The key of the configuration itself, with a dot at its end; "" for that of a command.
        fix: The text of the error after the limit.
        above: Whether they must be more than ``least``.
        below: What they must be less than; None: there is no such limit.
        most: What they may be at most; None: there is no such limit.

    Raises:
        ConfigError: One is out of the range; the message names it, its value, the range and the fix.
    """
    limits = [(operator.gt, "more than", least) if above else (operator.ge, "at least", least)]
    limits += [(operator.lt, "less than", below)] if below is not None else []
    limits += [(operator.le, "at most", most)] if most is not None else []
    for name in names:
        value = getattr(config, name)
        if value is not None and not all(compare(value, limit) for compare, _, limit in limits):
            text = " and ".join(f"{word} {limit}" for _, word, limit in limits)
            raise ConfigError(f"{block}{name} is {value}; it must be {text}{fix}")


def check_one_of(config: object, first: str, second: str, fix: str) -> None:
    """Refuse a configuration that has both or neither of two fields, in one of which the same thing is given.

    Args:
        fix: What each is for, a sentence.
    """
    names = [name for name in (first, second) if getattr(config, name) is not None]
    if len(names) != 1:
        state = "both are" if names else "neither is"
        raise ConfigError(f"exactly one of {first} and {second} is needed, but {state} given. {fix}")


def check_local(key: str, path: str, fix: str) -> None:
    """Refuse a URL in the place of a directory whose files are appended to."""
    if "://" in path:
        raise ConfigError(
            f"{key} is {path!r}; files there are appended to, as no bucket allows, so it must be a directory. {fix}"
        )


def check_output(key: str, path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be written, before the work whose result goes there; its directory is made."""
    try:
        check_file(path)
    except OSError as error:
        raise ConfigError(f"{key} {os.fspath(path)} cannot be written: {error}. Choose another place.") from error


def check_log_dir(log_dir: str) -> None:
    """Refuse a ``trainer.log_dir`` that cannot be made or written to; the leader calls it before the run's work."""
    place = os.path.abspath(log_dir)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    check_output("a file in trainer.log_dir,", os.path.join(place, ".probe"))


def check_run_dir(log_dir: str, run_id: str | None) -> None:
    """Refuse a ``trainer.log_dir`` that is a URL, and a ``trainer.run_id`` that can be no directory's name.

    Args:
        run_id: None is left to be made up.
    """
    check_local("trainer.log_dir", log_dir, "Checkpoints, models and the rows of lockstep sample may be at a URL.")
    if run_id is not None and (not run_id or set(run_id) & set("/\\") or run_id[0] == "."):
        raise ConfigError(
            f"trainer.run_id is {run_id!r}; it names a directory, so it must not be empty, hold a slash or start with "
            "a dot. Choose another, or null."
        )


class PromptError(LockstepError, ValueError):
    """A prompt that cannot be answered (empty, too long, not readable).

    Example:
        >>> lockstep.Request(prompt_id=3, prompt_tokens=(), params=lockstep.SamplingParams(max_new_tokens=1))
        Traceback (most recent call last):
            ...
        lockstep.errors.PromptError: prompt 3 has 0 tokens; the model needs at least 1 to start from. ...
    """


class CompilerError(LockstepError, RuntimeError):
    """A program that the compiler refused.

    Example:
        >>> try:
        ...     raise lockstep.errors.HbmError("the train step does not fit", needed=20, limit=16)
        ... except lockstep.errors.CompilerError as error:
        ...     print(error, error.needed - error.limit)
        the train step does not fit 4
    """

    def __init__(self, text: str, *, needed: int = 0, limit: int = 0) -> None:
        super().__init__(text)
        self.needed = needed
        """Bytes that it needs, 0 where the compiler does not say."""
        self.limit = limit
        """Bytes that there are, 0 where the compiler does not say."""


class HbmError(CompilerError):
    """A program that needs more device memory than there is.

    Example:
        >>> try:
        ...     raise lockstep.errors.HbmError("the train step does not fit", needed=20, limit=16)
        ... except lockstep.errors.HbmError as error:
        ...     print(error, error.needed, error.limit)
        the train step does not fit 20 16
    """


class VmemError(CompilerError):
    """A kernel that needs more of a TPU core's vector memory than it may have.

    Example:
        >>> try:
        ...     raise lockstep.errors.VmemError("the kernel does not fit", needed=20, limit=16)
        ... except lockstep.errors.VmemError as error:
        ...     print(error, error.needed, error.limit)
        the kernel does not fit 20 16
    """


class CapacityError(LockstepError, ValueError):
    """A request that can never fit the engine, whatever finishes before it.

    Example:
        >>> engine = lockstep.Engine(lockstep.EngineConfig(max_seq_len=8), mesh)
        >>> params = lockstep.SamplingParams(max_new_tokens=16)
        >>> engine.check(model, [lockstep.Request(prompt_id=0, prompt_tokens=(1,), params=params)])
        Traceback (most recent call last):
            ...
        lockstep.errors.CapacityError: prompt 0 ...
    """


class HostError(LockstepError, RuntimeError):
    """Something between the hosts of a job went wrong.

    Example:
        >>> try:
        ...     with hosts.run_on_all("read the prompts"):
        ...         open("missing.txt")
        ... except lockstep.errors.HostError as error:
        ...     print(error.on_every_process)
        True
    """

    on_every_process = False
    """Whether every process of the job raises this error with the same text, so that one needs to print it."""


class HostTimeoutError(HostError, TimeoutError):
    """A wait on other hosts ran out of time: names the key, the seconds, the missing processes and their last phase.

    Example:
        >>> from lockstep.hosts import Hosts, MemoryClient
        >>> first_of_two = Hosts(MemoryClient.hub(2)[0], timeout_s=0.1)
        >>> first_of_two.barrier("start")
        Traceback (most recent call last):
            ...
        lockstep.errors.HostTimeoutError: ...
    """


class DisagreementError(HostError):
    """Hosts have different values where they must have the same one: names the processes that differ.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from lockstep.hosts import Hosts, MemoryClient
        >>> def agree(client):
        ...     Hosts(client).agree("settings", {"learning rate": str(client.index)})
        >>> with ThreadPoolExecutor() as pool:
        ...     calls = [pool.submit(agree, client) for client in MemoryClient.hub(2)]
        >>> [type(call.exception()).__name__ for call in calls]
        ['DisagreementError', 'DisagreementError']
    """

    on_every_process = True


class PeerError(HostError):
    """A phase failed on at least one host. Raised with the same text on every host, also in a job of one.

    Args:
        text: The same on every host.
        processes: The number of processes that raise it. A process can be in a job of all and have one of its own.
        fault: Whether hardware, runtime or network failed, on all that failed, so that another attempt may succeed.

    Example:
        >>> with hosts.run_on_all("read the prompts"):
        ...     raise OSError("no such file")
        Traceback (most recent call last):
            ...
        lockstep.errors.PeerError: ...
    """

    on_every_process = True

    def __init__(self, text: str, processes: int = 1, fault: bool = False) -> None:
        super().__init__(text)
        self.processes = processes
        self.fault = fault


class DivergenceError(HostError):
    """Training has come to a loss that is not a number or far too large; raised on every host after the same step.

    Example:
        >>> lockstep.errors.DivergenceError("the loss of step 7 is nan").on_every_process
        True
    """

    on_every_process = True


class AlarmError(HostError):
    """An alarm ends the run (``alarms.on_alarm``); raised on every host before the same round of samples.

    Example:
        >>> lockstep.errors.AlarmError("inference_eval: step 500: loop in 24 of 32 answers").on_every_process
        True
    """

    on_every_process = True


class LaunchMismatchError(HostError):
    """Hosts launched different device programs, or the same ones in a different order.

    Example:
        >>> with lockstep.leader_only():
        ...     jax.numpy.zeros(3) + 1
        Traceback (most recent call last):
            ...
        lockstep.errors.LaunchMismatchError: ...
    """


_STATUS = re.compile(
    r"\b(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|ABORTED|"
    r"UNAUTHENTICATED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS):"
)
"""The status of the runtime, of the coordination service or of a storage library; the first one in a text counts."""
_FAULTS = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "FAILED_PRECONDITION", "UNAVAILABLE", "DATA_LOSS"}
_FAULTS_BUT_OF_THE_COMPILER = {"INTERNAL", "UNKNOWN"}
_COMPILER = re.compile(r"compil|lowering|Mosaic failed|HLO verif|xla/(service|hlo)|unsupported", re.IGNORECASE)
_MISTAKE = re.compile(r"(Config|Prompt|Capacity|Compiler|Hbm|Vmem|Disagreement|Divergence|LaunchMismatch)Error")
_RUNTIME = re.compile(r"(Jax|Xla)?RuntimeError|HostError")
_HARDWARE = re.compile(
    r"\bECC\b|\bICI\b|uncorrectable|halted (unexpectedly|prematurely)|hardware|machine check|slice health|\bXid\b",
    re.IGNORECASE,
)
_NETWORK = re.compile(
    r"HostTimeoutError|ServiceGoneError|(FS)?TimeoutError|\w*Connection\w*Error|BrokenPipeError|\w*ProxyError|"
    r"((Connect|Read)Timeout|Client(Connector|OS|Payload)|Server(Disconnected|Timeout)|ChunkedEncoding|Transport)\w*|"
    r"(Connect|Read|Write|RemoteProtocol)Error|(Pool|Write)Timeout"
)
"""Errors of Python, of ours, and of what reads buckets and the hub: aiohttp, requests, httpx, botocore, google.auth."""
_HTTP_STATUS = {408, 429, 500, 502, 503, 504}  # replies that another request may not get
_ERRNO = re.compile(r"\[Errno (5|19|100|101|103|104|110|112|113|116|121)\]")
"""Linux: input/output, no device, network down, connection lost, host down, stale handle, remote I/O."""


def is_fault(text: str) -> bool:
    """Whether an error is one of hardware, runtime or network, which another attempt may not meet.

    Args:
        text: Its type, a colon and its message. Running out of memory is a mistake, and what the compiler says is one.
    """
    name, _, message = text.partition(": ")
    name = name.rpartition(".")[2]
    if _NETWORK.fullmatch(name) or (name == "OSError" and _ERRNO.match(message)):
        return True
    if is_mistake(name) or "already in use" in message:  # the chips, by another process
        return False
    status_match = _STATUS.search(message)
    status = status_match[1] if status_match else ""
    if status in _FAULTS:
        return True
    if status in _FAULTS_BUT_OF_THE_COMPILER:
        return not _COMPILER.search(message)
    return status in ("", "RESOURCE_EXHAUSTED") and bool(_RUNTIME.fullmatch(name) and _HARDWARE.search(message))


def message_of(error: BaseException) -> str:
    """The text of an error, of a group with its errors; where code of others fails to make it, Python's words."""
    try:
        text = str(error)
    except Exception:
        return "<exception str() failed>"
    if isinstance(error, BaseExceptionGroup):
        text += "".join(f"; {type(inner).__name__}: {message_of(inner)}" for inner in error.exceptions)
    return text


def is_passing(error: BaseException) -> bool:
    """Whether an error is a fault (`is_fault`) by its text, or by the status of the HTTP reply that it comes from.

    What the user has to change is none, such as a damaged checkpoint, whatever its text quotes.
    """
    if isinstance(error, ConfigError):
        return False
    status: typing.Any = getattr(getattr(error, "response", None), "status_code", None)  # requests, httpx
    status = next((getattr(error, name) for name in ("status", "code") if hasattr(error, name)), status)
    return is_fault(f"{type(error).__name__}: {message_of(error)}") or (
        isinstance(status, int) and status in _HTTP_STATUS
    )


def is_mistake(name: str) -> bool:
    """Whether errors of this name are of what the user gave, which another attempt would meet again."""
    return bool(_MISTAKE.fullmatch(name))
