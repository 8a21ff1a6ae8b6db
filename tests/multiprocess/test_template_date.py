"""A chat template with today's date: a run keeps that of its first start, on hosts in two zones, on another day."""

import json
import os
import shutil
import time

import pytest

from tests import tiny
from tests.multiprocess.harness import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ZONES = ("UTC-14", "UTC+12")
"""26 hours apart: the date is never the same in both. Each start has them the other way round."""
TEMPLATE = "Today is {{ strftime_now('%d %b %Y') }}. {% for message in messages %}{{ message.content }} {% endfor %}"


def body(hosts, directory):
    """A run that goes on, and a job of samples that is started again, each in the two zones and the two the other way.

    Returns:
        The codes of the four, and the dates that this process has seen at the time.
    """
    from lockstep.batch_inference import JobConfig, SampleConfig, sample
    from lockstep.main.arguments import parse_arguments
    from lockstep.training import TrainLmConfig, train

    def job():
        return SampleConfig(
            prompts=[{"messages": [{"role": "user", "content": "What is 12 plus 7?"}]}],
            checkpoint_path=f"{directory}/run",
            max_new_tokens=4,
            trainer=JobConfig(log_dir=directory, run_id="sampled"),
        )

    steps = ["--trainer.num_train_steps"]
    words = ["--config_path", f"{directory}/run.yaml", "--trainer.log_dir", directory, *steps]
    codes, dates = [], []
    for start in (0, 1):
        os.environ["TZ"] = ZONES[(hosts.index + start) % 2]
        time.tzset()
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache-{hosts.index}-{start}"  # each on a machine of its own
        dates.append(time.strftime("%Y-%m-%d"))
        codes.append(train(parse_arguments(TrainLmConfig, [*words, str(2 + 2 * start)]), hosts))
    for start in (0, 1):
        os.environ["TZ"] = ZONES[(hosts.index + start) % 2]
        time.tzset()
        codes.append(sample(job(), hosts))
    return codes, dates


@pytest.mark.nightly  # in make slow: unit/text/test_template_date.py
def test_the_date_of_the_first_start_is_that_of_every_start_on_every_host(tmp_path):
    shutil.copytree(tiny.TOKENIZER, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "user", "content": "What is 1 plus 2?"}, {"role": "assistant", "content": "three"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 8)
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "tokenizer": str(tmp_path / "tokenizer"),
                "data": {"train_urls": [str(tmp_path / "chats.jsonl")], "format": "chat", "max_seq_len": 64}
                | {"require_end_token": False},
                "model": {"type": "llama", "max_seq_len": 64, "hidden_dim": 32, "intermediate_dim": 64}
                | {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
                "trainer": {"train_batch_size": 8, "run_id": "run", "checkpointer": {"every": 2}},
                "inference_eval": {"eval_every": 2, "prompts": ["What is 12 plus 7?"], "max_new_tokens": 4},
            }
        )
    )
    results = run_processes(body, args=(str(tmp_path),), own="its clock and its cache are its own", timeout_s=300)
    dates = [seen for _, seen in results]
    assert len({*dates[0]}) == 2 and dates[0] == dates[1][::-1], "this test proves nothing: it is one day everywhere"
    assert [codes for codes, _ in results] == [[0, 0, 0, 0]] * 2
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "train/loss" in line] == [1, 2, 3, 4]
    first = dates[0][0]  # of the leader's clock
    for step in (2, 4):
        text = (tmp_path / "run" / "checkpoints" / f"step-{step}" / "metadata.json").read_text()
        assert json.loads(text)["facts"]["date of the chat template"] == first
    caches = [path.name for path in tmp_path.glob("cache-*/lockstep/data/*")]
    assert len(caches) == 4 and len({*caches}) == 1
    assert json.loads((tmp_path / "sampled" / "samples" / "job.json").read_text())["date of the chat template"] == first
