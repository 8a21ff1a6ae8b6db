"""``lockstep sample`` on real processes: the same rows in both modes, on any number of hosts, however often cut off."""

import shutil
from pathlib import Path
from unittest import mock

import jax
import pytest

from lockstep.engine import EngineConfig
from lockstep.placement import make_mesh
from lockstep.report import read_jsonl
from lockstep.text import decode, encode, load_tokenizer, read_prompts, stop_ids
from lockstep.types import Request
from tests import wandb_run
from tests.multiprocess.harness import run_processes
from tests.multiprocess.launches import record_launches
from tests.oracle import oracle_completions

pytestmark = pytest.mark.multiprocess

ROUNDS, GENERATIONS, NEW = 2, 2, 12
WITH_WANDB = ("global_mesh", "quiet")
HBM = 1 << 30
"""What a device is said to hold, since CPU counts nothing."""
PROMPTS = [
    {"prompt": "What is 12 plus 7?", "answer": "nineteen"},
    "one",
    {"messages": [{"role": "user", "content": "What is 3 plus 4?"}]},
    "What is 8281 in words? " * 2,
    "What",
    "is 9 plus 9 a number?",
    "two three",
]
OPTIONS = {
    "n_rounds": ROUNDS,
    "n_generations": GENERATIONS,
    "max_new_tokens": NEW,
    "temperature": 0.9,
    "top_k": 20,
    "seed": 5,
    "max_prompts_per_batch": 3,
    "metrics": ["length", "regex=o"],
    "engine": EngineConfig(layout={"tensor": 1}),  # every replica works, though all are on one machine
}


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Text and number of tokens of every row, by the plain forward on one device."""
    from lockstep.batch_inference import SampleConfig
    from lockstep.models.hf.load import load_hf

    model = load_hf(checkpoint, make_mesh("1,1,1", jax.devices()[:1]))
    tokenizer = load_tokenizer(checkpoint)
    config = SampleConfig(hf_checkpoint=str(checkpoint), prompts=PROMPTS, **OPTIONS)
    prompts = read_prompts(PROMPTS)
    rows = []
    for round_ in range(ROUNDS):
        params = config.sampling_params(stop_ids(tokenizer), round_)
        requests = [
            Request(prompt_id=prompt.id, prompt_tokens=tokens, params=params)
            for prompt, tokens in zip(prompts, encode(tokenizer, prompts), strict=True)
        ]
        vocab = max(tokenizer.get_vocab().values()) + 1
        for answer in oracle_completions(model, requests, vocab_size=vocab):
            rows.append((round_, answer.prompt_id, answer.generation_id, decode(tokenizer, answer.tokens)))
    return rows


def body_sample(hosts, checkpoint, directory):
    from lockstep.batch_inference import JobConfig, SampleConfig
    from lockstep.batch_inference.run import sample
    from lockstep.errors import PeerError
    from lockstep.report.trackers import JsonlTrackerConfig, WandbTrackerConfig

    def config(name, **values):
        trackers = (JsonlTrackerConfig(), WandbTrackerConfig(mode="offline", project="test"))
        trainer = JobConfig(log_dir=directory, run_id=name, tracker=trackers if name in WITH_WANDB else trackers[0])
        return SampleConfig(hf_checkpoint=checkpoint, prompts=PROMPTS, trainer=trainer, **{**OPTIONS, **values})

    launches = {}
    for mode in ("global_mesh", "host_data_parallel"):
        used = [{"bytes_in_use": HBM + hosts.index, "peak_bytes_in_use": 2 * HBM + hosts.index}]
        with (
            record_launches() as launched,
            mock.patch("lockstep.placement.device.memory._stats", lambda used=used: used),
        ):
            assert sample(config(mode, inference_mode=mode), hosts) == 0
        launches[mode] = launched
    # An interrupted run, by hand: half the rows of one host, the other host's torn in the middle of a line.
    root = Path(directory)
    if hosts.is_leader:
        shutil.copytree(root / "host_data_parallel", root / "cut", ignore=shutil.ignore_patterns("metrics.jsonl"))
        samples = root / "cut" / "samples"
        (samples / "samples.jsonl").unlink()
        first, second = samples / "samples-host-000.jsonl", samples / "samples-host-001.jsonl"
        lines = first.read_bytes().splitlines(keepends=True)
        first.write_bytes(b"".join(lines[: len(lines) // 2]))
        second.write_bytes(second.read_bytes()[:-9])
    hosts.barrier("cut")
    with pytest.raises(PeerError, match=r"differs from this one: .*seed was 5 and is 6.*--resume force"):
        sample(config("cut", seed=6), hosts)
    assert sample(config("cut"), hosts) == 0
    assert sample(config("cut"), hosts) == 0  # nothing is left to do
    quiet = {"inference_mode": "host_data_parallel", "enable_host_rows_gather": False, "skip_samples_table": True}
    assert sample(config("quiet", **quiet), hosts) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGASCALE_NUM_SLICES", "2")
        for mode in ("global_mesh", "host_data_parallel"):
            assert sample(config(f"slices-{mode}", inference_mode=mode), hosts) == 0
    return {"launches": launches, "keys": len(hosts.client.get_dir("lockstep/job"))}


@pytest.mark.slow
def test_both_modes_give_the_rows_of_the_oracle_and_go_on_where_they_were_cut_off(checkpoint, expected, tmp_path):
    arguments = (str(checkpoint), str(tmp_path))
    leader, follower = run_processes(body_sample, timeout_s=300, args=arguments, own="W&B's service outlives its runs")
    merged = tmp_path / "global_mesh" / "samples" / "samples.jsonl"
    rows = read_jsonl(merged)
    assert [(r["round"], r["prompt_id"], r["generation_id"], r["generated_text"]) for r in rows] == expected
    for name in ("host_data_parallel", "cut", "slices-global_mesh", "slices-host_data_parallel"):
        assert (tmp_path / name / "samples" / "samples.jsonl").read_bytes() == merged.read_bytes(), name
        assert not list((tmp_path / name / "samples").glob(".*"))
    for row in rows:
        assert row["length"] == row["num_tokens"] and row["regex"] == float("o" in row["generated_text"])

    # In lockstep every host launches the same; for themselves hosts may differ, and meet over the service alone.
    assert leader["launches"]["global_mesh"] == follower["launches"]["global_mesh"] != []
    of_each = [read_jsonl(tmp_path / "host_data_parallel/samples" / f"samples-host-00{host}.jsonl") for host in (0, 1)]
    assert [len(each) for each in of_each] == [len(rows) // 2] * 2

    def last_metrics(name):
        return read_jsonl(tmp_path / name / "metrics.jsonl")

    final = last_metrics("global_mesh")[-1]
    assert final["sample/total_prompts"] == len(PROMPTS)
    assert final["sample/total_generated_tokens"] == sum(row["num_tokens"] for row in rows)
    assert (final["sample/num_hosts"], final["sample/inference_mode"]) == (2, "global_mesh")
    assert final["sample/tokens_per_second"] > 0
    assert final["sample/length"] == pytest.approx(sum(row["length"] for row in rows) / len(rows))
    progress = last_metrics("host_data_parallel")[-2]
    assert progress["sample/progress/rows_done"] == progress["sample/progress/rows_total"] == len(rows)
    assert {"sample/progress/host_0/tokens_per_second", "sample/progress/over_floor"} <= progress.keys()

    resumed = [each["sample/resumed_completions"] for each in last_metrics("cut") if "sample/total_prompts" in each]
    assert len(rows) // 4 < resumed[0] < len(rows) and resumed[1] == len(rows)
    assert final["sample/total_prompts"] == last_metrics("quiet")[-1]["sample/total_prompts"]
    assert last_metrics("quiet")[-1]["sample/total_completions"] == len(rows)
    assert not (tmp_path / "quiet/samples/samples.jsonl").exists()

    check_wandb(tmp_path, rows)


def check_wandb(directory, rows):
    """Table, columns and figures have the promised names, from the leader alone; without a table, figures remain."""
    (run,) = (directory / "global_mesh").glob("wandb/offline-run-*")
    (table,) = wandb_run.tables(run, "sample/samples")
    columns = ["round", "prompt_id", "generation_id", "prompt", "generated_text", "num_tokens"]
    assert table["columns"] == [*columns, "length", "regex"]
    assert table["data"] == [[row[column] for column in table["columns"]] for row in rows]
    (quiet,) = (directory / "quiet").glob("wandb/offline-run-*")
    assert not wandb_run.tables(quiet, "sample/samples")
    for each, mode, name in ((run, "global_mesh", "global_mesh"), (quiet, "host_data_parallel", "quiet")):
        step, values = wandb_run.history(each)[-1]
        assert step == len(rows)
        tokens = sum(row["num_tokens"] for row in rows)
        assert values["sample/total_prompts"] == len(PROMPTS)
        assert values["sample/total_generated_tokens"] == tokens
        assert (values["sample/num_hosts"], values["sample/inference_mode"]) == (2, mode)
        assert values["sample/tokens_per_second"] > 0
        of_file = read_jsonl(directory / name / "metrics.jsonl")[-1]
        assert {k: v for k, v in of_file.items() if k not in ("step", "time")}.items() <= values.items()
    hbm = {f"sample/hbm/{moment}_bytes": HBM + 1 for moment in ("before_load", "after_load", "after_engine")}
    values = wandb_run.history(run)[-1][1]
    assert {k: v for k, v in values.items() if "hbm" in k} == hbm | {"sample/hbm/peak_bytes": 2 * HBM + 1}
