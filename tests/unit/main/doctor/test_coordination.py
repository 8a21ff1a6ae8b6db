"""Latencies of the coordination service."""

from lockstep.main.doctor.coordination import judge_coordination, measure_coordination
from tests.multiprocess.harness import run_threads


def test_every_process_measures_and_no_key_is_left():
    def body(hosts):
        found = measure_coordination(hosts)
        hosts.barrier("end")
        hosts.barrier("the leader has deleted the keys of earlier calls")
        return found, len(hosts.client.get_dir("lockstep/job"))

    results = run_threads(body, 3)
    assert len(results) == 3 and all(found["barrier_s"] > 0 and found["exchange_s"] > 0 for found, _ in results)
    assert [left for _, left in results] == [0, 0, 0]


def test_the_slowest_process_counts():
    quick, slow = {"barrier_s": 0.001, "exchange_s": 0.002}, {"barrier_s": 0.08, "exchange_s": 0.1}
    assert judge_coordination([quick, quick]).text == "a barrier takes 1 ms, an exchange 2 ms (median of 20)"
    found = judge_coordination([quick, slow])
    assert found.outcome == "warning" and found.text.startswith("a barrier takes 80 ms")
    assert judge_coordination([slow]).outcome == "ok", "one process waits for nobody"
