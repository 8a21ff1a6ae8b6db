import logging

from lockstep.batch_inference.checkpoint import LoadProgress


def test_the_leader_says_how_much_it_has_read_and_how_fast(caplog):
    caplog.set_level(logging.INFO)
    for logs in (False, True):
        progress = LoadProgress(logs=logs)
        progress._start -= 2.0
        progress(1 << 20, 3 << 20)
        progress(2 << 20, 3 << 20)
        assert progress.bytes == 3 << 20
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("loading: 3.00 MiB of 3.00 MiB on this host, 1.") and line.endswith(" MiB/s")
