"""The pytest plugin: tests that run in several processes. ``pytest_plugins = ["lockstep.testing.plugin"]``."""

import inspect
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lockstep.testing.pool import POOL
from lockstep.testing.protocol import Placeholder, Reference

MARKER = "processes"
HELP = (
    "processes(count=2, devices=2, timeout_s=120.0, env=None, own=''): run the test in every process of a job of so "
    "many processes with so many CPU devices each; it passes where it passes in all of them"
)


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker to those that ``--strict-markers`` knows and ``--markers`` shows."""
    config.addinivalue_line("markers", HELP)


@pytest.fixture(scope="session", autouse=True)
def _no_group_outlives_the_tests() -> Iterator[None]:
    """End the processes that the tests share, if there are any."""
    yield
    POOL.end()


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Placeholder:
    """The `lockstep.hosts.Hosts` of each process of a test marked ``processes``."""
    if request.node.get_closest_marker(MARKER) is None:
        pytest.fail(
            f"{request.node.name} uses the fixture hosts, but runs in this process alone. Mark it with "
            "@pytest.mark.processes(2), or call lockstep.testing.run_threads.",
            pytrace=False,
        )
    return Placeholder.HOSTS


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test in its processes instead of here."""
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return None
    try:
        options = _options(*marker.args, **marker.kwargs)
    except TypeError as error:
        pytest.fail(f"{error}. The marker is {HELP}.", pytrace=False)
    _refuse_what_differs(pyfuncitem)
    classes = [node.name for node in pyfuncitem.listchain() if isinstance(node, pytest.Class)]
    reference = Reference(
        module=pyfuncitem.module.__name__, name=".".join([*classes, pyfuncitem.originalname]), file=str(pyfuncitem.path)
    )
    names = inspect.signature(pyfuncitem.obj).parameters
    values = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    _refuse_what_stays_here(values)
    try:
        POOL.call(reference, ((), values), name=pyfuncitem.name, **options)
        return True
    except AssertionError as error:
        text = str(error)
    pytest.fail(text, pytrace=False)  # the processes' stacks are in the text; ours says nothing


def _options(
    count: int = 2, devices: int = 2, timeout_s: float = 120.0, env: Mapping[str, str] | None = None, own: str = ""
) -> dict[str, Any]:
    return {"processes": count, "devices": devices, "timeout_s": timeout_s, "env": env, "own": own}


def _refuse_what_differs(item: pytest.Function) -> None:
    """Fail where the processes would not run the same test."""
    if getattr(item.obj, "is_hypothesis_test", False):
        pytest.fail(
            "A test of hypothesis would draw other examples in each process. Draw them in a test that is not marked, "
            "and hand each to lockstep.testing.run_processes.",
            pytrace=False,
        )
    if inspect.iscoroutinefunction(item.obj):
        pytest.fail("A coroutine cannot be marked: mark a plain function that calls asyncio.run.", pytrace=False)


def _refuse_what_stays_here(values: Mapping[str, Any]) -> None:
    """Fail where a fixture's value cannot be sent to other processes, or would act on this one."""
    for name, value in values.items():
        try:
            reason = "it acts on the process of pytest" if type(value).__module__.startswith("_pytest.") else ""
            pickle.dumps(value)
        except Exception as error:
            reason = f"it cannot be pickled: {error}"
        if reason:
            pytest.fail(
                f"The fixture {name!r} gives a {type(value).__name__}, which other processes cannot use: {reason}. "
                "Make it inside the test, or have the fixture return plain values.",
                pytrace=False,
            )
