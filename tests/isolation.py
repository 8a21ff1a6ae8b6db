"""The environment of the tests: the same in every folder, for every user, whatever is exported or configured there.

`isolate` takes away what could differ before anything reads it. A test that needs what the user has, such as the way to
a package registry, asks for `user_environment`; ``LOCKSTEP_TEST_KEEP="NAME NAME"`` keeps variables as they are.
"""

import atexit
import contextlib
import json
import locale
import os
import shutil
import signal
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILED_FAST = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)
"""Most of a test's time goes to compiling programs that run for milliseconds. Without optimisations, and with loops by
XLA's older emitters, it takes an eighth; in one piece for LLVM, a sixth less again. `make nightly`, and `make slow`
where a test is marked ``optimized``, compile as users do."""
DEVICES = "--xla_force_host_platform_device_count=4"

KEPT = {
    *("CI", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PATH"),
    *("LOGNAME", "SHELL", "TMPDIR", "USER"),
    *("CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"),
}
"""Where programs, libraries and certificates are, and who runs the tests. All other variables go."""
KEPT_PREFIXES = ("LOCKSTEP_FUZZ_", "LOCKSTEP_TEST_", "PIP_", "PYENV_", "PYTEST_XDIST_", "UV_")

SET = {
    "COLUMNS": "80",
    # Newer gcsfs (2026.7) asks by gRPC and TLS what kind of bucket it is, without end where it is fake_gcs.py.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_KEY_0": "safe.directory",  # a clone may belong to another user than the tests' processes
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_PYTHON_REFRESH": "quiet",  # Levanter imports GitPython, which refuses that where git is missing
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "jax-cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PLATFORMS": "cpu",
    # To note which lines of Python each operation comes from takes 6% of a short training.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "XLA_FLAGS": COMPILED_FAST,
}
SOCKET_BYTES = 60
"""A directory for temporary files with a longer name leaves other programs, Chromium among them, too few of the 104
bytes that the path of a socket may have."""
_HOME = "LOCKSTEP_TEST_HOME"
_USER = ".user-environment.json"


def isolate() -> None:
    """Make the environment of this process, and of those that it starts, that of the tests.

    A worker of pytest-xdist finds it made, and only sets what the user's terminal can have given it as well.
    """
    if _HOME not in os.environ:
        home = tempfile.mkdtemp(prefix="lockstep-home-", dir=_short_temporary())
        Path(home, _USER).write_text(json.dumps(dict(os.environ)), encoding="utf-8")
        owner = os.getpid()  # a process that was forked from this one ends before it
        atexit.register(lambda: shutil.rmtree(home, ignore_errors=True) if os.getpid() == owner else None)
        os.environ[_HOME] = home
    stays = {*KEPT, *os.environ.get("LOCKSTEP_TEST_KEEP", "").split()}
    for name in set(os.environ) - stays:
        if not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    os.environ |= {name: value for name, value in SET.items() if name not in stays}
    os.environ |= {"HOME": os.environ[_HOME], "TMPDIR": _short_temporary()}
    os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ[_HOME], ".cache")
    if DEVICES not in os.environ.setdefault("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] += f" {DEVICES}"
    tempfile.tempdir = None  # it is asked for anew
    with contextlib.suppress(locale.Error):  # files without an encoding are read and written in the locale's
        locale.setlocale(locale.LC_ALL, SET["LC_ALL"])
    os.umask(0o022)
    os.chdir(ROOT)
    # A shell starts what it leaves in the background with SIGINT ignored, nohup with SIGHUP; processes of tests would
    # inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def user_environment() -> dict[str, str]:
    """The variables that the tests were started with."""
    environment: dict[str, str] = json.loads(Path(os.environ[_HOME], _USER).read_text(encoding="utf-8"))
    return environment


def _short_temporary() -> str:
    """The directory for temporary files, or /tmp where its name is too long for a socket below it."""
    directory = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(directory)) > SOCKET_BYTES and os.access("/tmp", os.W_OK) else directory
