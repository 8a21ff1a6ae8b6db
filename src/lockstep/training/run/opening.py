"""Opening a run: everything that hosts read, check and agree on before the model is made."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from lockstep.callback import SampleCallback
from lockstep.config_fields import encode_config
from lockstep.errors import check_log_dir
from lockstep.hosts import Hosts, config_digest, leader_only, try_leader_only
from lockstep.models import LlamaConfig, padded_vocab_size
from lockstep.placement import make_mesh
from lockstep.report import FINISH_S, BackgroundTracker, NoopTracker, Tracker, check_trackers, load_metrics
from lockstep.storage import HUB_WAIT_S
from lockstep.text import check_vocab, fetch_tokenizer, stop_ids, tokenizer_digest
from lockstep.training.checkpoints.saved_model import SavedAdapters
from lockstep.training.data import DataConfig
from lockstep.training.data.example_check import ExampleSource, check_examples
from lockstep.training.run.config import Data, TrainConfig, check_validation
from lockstep.training.run.initial_model import describe_adapters, model_shape
from lockstep.training.run.run_dir import make_run_dir, start_tracker, take_leases, template_date_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAST_FLUSH_S = 2.0
"""Seconds that reports of rounds still have when everything else is done; at the end of training they had more."""


@dataclasses.dataclass(kw_only=True)
class ReadRun:
    """Tokenizer, shapes and objective of a run, read before its data, the same on every host."""

    mesh: Mesh
    tokenizer: "PreTrainedTokenizerBase"
    model_config: LlamaConfig
    token_ids: int
    vocab_size: int  # with the rows that the mesh needs
    objective: Any
    adapters: SavedAdapters | None
    facts: dict[str, str]
    """The facts of the run that a checkpoint keeps, and that a resume compares."""


@dataclasses.dataclass(kw_only=True)
class OpenRun(ReadRun):
    """A run with its data, directory and tracker, all of it agreed on by the hosts."""

    rows: Data
    validation: Mapping[str, Any]
    run_dir: Path
    tracker: Tracker
    samples: SampleCallback | None = None
    """The hook that samples, once it is made."""

    def close(self, timeout_s: float) -> None:
        """Report the rounds before an error too, and close the tracker; the leader calls it."""
        if self.samples is not None:
            self.samples.flush(min(LAST_FLUSH_S, timeout_s / 4))
        try_leader_only("closing the tracker", self.tracker.finish, "what it had written is kept")


def open_run(config: TrainConfig, hosts: Hosts) -> OpenRun:
    """Read, check and agree on everything before the model is made; every host makes this call.

    Raises:
        PeerError: Preparing failed on a host.
        DisagreementError: The hosts have different configurations or data.
        ConfigError: The model does not fit the mesh.
    """
    source, seed = config.source, config.trainer.seed
    run = _read(config, hosts)
    longest = run.model_config.max_seq_len
    run.facts |= template_date_facts(config.trainer, run.tokenizer, hosts)
    rows = source.load(run.tokenizer, longest, seed, hosts, run.token_ids)
    validation = source.load_validation(run.tokenizer, longest, hosts, run.token_ids)
    run.facts["training data"] = rows.digest()
    hosts.agree("training data", run.facts)
    if isinstance(config.data, DataConfig) and isinstance(rows, ExampleSource):  # a program's own rows may have neither
        ends = config.inference_eval.sampling_params(stop_ids(run.tokenizer)).stop_token_ids
        length = config.data.row_length(longest)
        check_examples(config.data, rows, run.tokenizer, ends, length=length, seed=seed, hosts=hosts)
    run_dir = make_run_dir(config.trainer, hosts)
    tracker: Tracker = NoopTracker()
    with hosts.run_on_all("run directory and trackers"):
        if hosts.is_leader:
            take_leases(config.trainer, run_dir)
            built = start_tracker(config.trainer, run_dir, encode_config(config))
            # The others wait for the leader at their end, at most timeout_s.
            tracker = BackgroundTracker(built, leader_only, finish_s=min(FINISH_S, hosts.timeout_s / 2))
    return OpenRun(**vars(run), rows=rows, validation=validation, run_dir=run_dir, tracker=tracker)


def _read(config: TrainConfig, hosts: Hosts) -> ReadRun:
    """Tokenizer, shapes and objective; the facts are agreed on, as far as there are any without the data."""
    hosts.agree("config", {"config": config_digest(config)})

    def fetch() -> bytes:
        check_trackers(config.trainer.tracker)  # before anything is read
        check_log_dir(config.trainer.log_dir)
        return fetch_tokenizer(config.tokenizer, config.trust_remote_code, config.initialize_from_hf or "")

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading tokenizer") as prepared:
        check_validation(config.trainer, config.source)
        mesh = make_mesh(config.trainer.mesh_shape)
        config.trainer.microbatches(mesh)
        tokenizer = config.read_tokenizer(fetched)
        model_config, token_ids = model_shape(config, tokenizer)
        check_vocab(tokenizer, token_ids)
        vocab_size = token_ids if config.model is None else padded_vocab_size(token_ids, mesh.shape["tp"])
        if config.inference_eval.enabled:
            load_metrics(config.inference_eval.metrics)
            config.inference_eval.alarms.load_action()
        objective = config.make_objective(tokenizer)
        facts = {"tokenizer": tokenizer_digest(tokenizer), **config.facts()}
        adapters = describe_adapters(config, model_config)
        if adapters is not None:
            facts |= {"base model": adapters.fingerprint, "lora.alpha / lora.r": str(adapters.lora.scale)}
        prepared.agree(facts)
    return ReadRun(
        mesh=mesh,
        tokenizer=tokenizer,
        model_config=model_config,
        token_ids=token_ids,
        vocab_size=vocab_size,
        objective=objective,
        adapters=adapters,
        facts=facts,
    )
