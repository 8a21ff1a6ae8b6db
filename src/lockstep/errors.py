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


class HostTimeoutError(HostError, TimeoutError):
    """A wait on other hosts ran out of time: names the key, the seconds, the missing processes and their last phase."""


class DisagreementError(HostError):
    """Hosts hold different values where they must hold the same one: names the processes that differ."""


class PeerError(HostError):
    """A host-only phase failed on at least one host. Raised with the same text on every host."""


class LaunchMismatchError(HostError):
    """Hosts launched different device programs, or the same ones in a different order."""
