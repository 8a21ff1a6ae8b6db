"""Every error that lockstep raises on purpose. Each says what was given, the limit, and what to change."""


class LockstepError(Exception):
    """Base of all errors that lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A configuration value that cannot work: the message names the field, the value, the limit and the fix."""


class PromptError(LockstepError, ValueError):
    """A prompt that cannot be answered (empty, too long, not readable)."""


class CompilerError(LockstepError, RuntimeError):
    """A program that the compiler refused."""

    def __init__(self, text: str, *, needed: int = 0, limit: int = 0) -> None:
        super().__init__(text)
        self.needed = needed
        """Bytes that it needs, 0 where the compiler does not say."""
        self.limit = limit
        """Bytes that there are, 0 where the compiler does not say."""


class HbmError(CompilerError):
    """A program that needs more device memory than there is."""


class VmemError(CompilerError):
    """A kernel that needs more of a TPU core's vector memory than it may have."""


class CapacityError(LockstepError, ValueError):
    """A request that can never fit the engine, whatever finishes before it."""


class HostError(LockstepError, RuntimeError):
    """Something between the hosts of a job went wrong."""

    on_every_process = False
    """Whether every process of the job raises this error with the same text, so that one needs to print it."""


class HostTimeoutError(HostError, TimeoutError):
    """A wait on other hosts ran out of time: names the key, the seconds, the missing processes and their last phase."""


class DisagreementError(HostError):
    """Hosts have different values where they must have the same one: names the processes that differ."""

    on_every_process = True


class PeerError(HostError):
    """A phase failed on at least one host. Raised with the same text on every host, also in a job of one.

    Args:
        text: The same on every host.
        processes: The number of processes that raise it. A process can be in a job of all and have one of its own.
    """

    on_every_process = True

    def __init__(self, text: str, processes: int = 1) -> None:
        super().__init__(text)
        self.processes = processes


class DivergenceError(HostError):
    """Training has come to a loss that is not a number or far too large; raised on every host after the same step."""

    on_every_process = True


class LaunchMismatchError(HostError):
    """Hosts launched different device programs, or the same ones in a different order."""
