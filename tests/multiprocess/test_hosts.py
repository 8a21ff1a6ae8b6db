"""hosts/ between real processes."""

from harness import run_processes

from lockstep.hosts import Hosts


def body_barrier(hosts: Hosts) -> list[int]:
    import jax

    with hosts.scope("round") as scope:
        scope.barrier("x")
        got = scope.broadcast("hello", b"hello" if hosts.is_leader else None)
    return [hosts.index, hosts.count, jax.device_count(), jax.local_device_count(), len(got)]


def test_barrier():
    assert run_processes(body_barrier) == [[0, 2, 4, 2, 5], [1, 2, 4, 2, 5]]
