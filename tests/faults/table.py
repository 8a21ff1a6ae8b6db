"""The faults that are tested, and what the documentation says of them."""

import dataclasses

GOES_ON, EXITS, STOPS = "training goes on", "every process exits", "training stops in order"
SAVED = "the save is finished"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row: the test ``test_<name>`` proves it.

    Args:
        name: The name of the test, without ``test_``.
        what: What happens.
        ends: How it ends for training.
        sees: What the user is told; the test finds this text. Empty: nothing, and the test finds that nothing is told.
        deadline_s: The test fails if it ends later: seconds from the fault until every host is back in training, or has
            ended. The round, its compiling included, counts too; ``timeout_s`` is 2 where a wait must run out. On 4
            processes, which share the same two cores, twice that where they compile.
        on_four: tested on 4 processes too, because more than one peer matters.
    """

    name: str
    what: str
    ends: str
    sees: str
    deadline_s: float
    on_four: bool = False


FAULTS = [
    Fault("leader_tokenizer_raises", "the leader's tokenizer raises", GOES_ON, "the tokenizer is broken", 10, True),
    Fault("prompt_file_missing_on_one_host", "the prompt file is missing", GOES_ON, "does not exist", 10),
    Fault("prompts_differ", "hosts have different prompts", GOES_ON, "disagree", 10, True),
    Fault(
        "configuration_differs", "hosts have different settings", GOES_ON, "'inference_eval.max_new_tokens'", 10, True
    ),
    Fault("tokenizers_differ", "hosts have different tokenizers", GOES_ON, "'tokenizer'", 10),
    Fault("xla_flags_differ", "hosts have different XLA flags", GOES_ON, "XLA_FLAGS --xla_cpu_enable_fast_math", 10),
    Fault("jax_versions_differ", "hosts have different versions of jax", GOES_ON, "'jax version'", 10),
    Fault("code_differs", "hosts run different code", GOES_ON, "'code of lockstep'", 10),
    Fault("a_host_is_late_but_in_time", "a host comes late, within timeout_s", GOES_ON, "", 30, True),
    Fault("metric_raises", "a metric raises", GOES_ON, "no such score", 30),
    Fault("metric_backtracks", "a pattern of a metric backtracks for ever", GOES_ON, "not done with 81 characters", 30),
    Fault("metric_launches", "a metric launches a device program", GOES_ON, "leader-only work", 30),
    Fault("tracker_launches", "the tracker (W&B) launches a device program", GOES_ON, "leader-only work", 30),
    Fault("tracker_raises", "the tracker (W&B) raises", GOES_ON, "the tracker is down", 30),
    Fault("metric_is_slow", "a metric takes longer than trainer.distributed.timeout_s", GOES_ON, "", 30),
    Fault("metric_never_returns", "a metric never returns", GOES_ON, "step 2 (3 rows) is not done", 30),
    Fault("judge_does_not_answer", "the server of a judge does not answer", GOES_ON, "step 2 (3 rows) is not done", 30),
    Fault("file_system_hangs", "the file system hangs", GOES_ON, "step 2 (3 rows) is not done", 30),
    Fault("tracker_blocks", "the tracker (W&B) hangs", GOES_ON, "step 2 (3 rows) is not done", 30),
    Fault("trainers_tracker_blocks", "the trainer's own tracker blocks", GOES_ON, "did not take all figures", 30),
    Fault(
        "report_hangs_while_saving",
        "a metric hangs, and each step has a checkpoint",
        GOES_ON,
        "without all reports",
        10,
    ),
    Fault("disk_full", "the disk is full while samples are written", GOES_ON, "No space left on device", 30),
    Fault("jsonl_torn", "the last line of samples.jsonl is torn", GOES_ON, "ends in a torn line", 30),
    Fault("out_of_pages", "a prompt can never fit the pages", GOES_ON, "Raise max_pages to at least", 10),
    Fault("out_of_device_memory_on_one_host", "one host has no device memory left", GOES_ON, "memory", 10, True),
    Fault("stop_finder_raises_on_one_host", "a stop string's search raises on one host", GOES_ON, "no text", 30, True),
    Fault("commit_raises_on_one_host", "taking results raises on one host", GOES_ON, "no room for results", 30),
    Fault("prefill_cannot_be_placed_on_one_host", "one host cannot place a batch", GOES_ON, "no room for a batch", 30),
    Fault("audit_cannot_be_placed_on_one_host", "one host cannot place an audit", GOES_ON, "no room for a batch", 30),
    Fault("nan_weights", "the weights are not numbers", GOES_ON, "log-probabilities that are no numbers (NaN)", 30),
    Fault("token_ids_out_of_range", "the tokenizer has ids that the model has not", GOES_ON, "do not match", 10),
    Fault("deleted_model", "the model was donated to the next step", GOES_ON, "deleted", 30),
    Fault("errors_in_a_row", "max_consecutive_errors rounds fail", GOES_ON, "sampling is switched off", 10),
    Fault("sigterm_while_compiling_the_train_step", "SIGTERM on one host as the train step compiles", STOPS, "", 20),
    Fault("sigterm_while_reading_prompts", "SIGTERM on one host while prompts are read", STOPS, "asked to end", 20),
    Fault("sigterm_while_preparing", "SIGTERM on one host as it compiles for a round", STOPS, "asked to end", 20, True),
    Fault("sigterm_while_generating", "SIGTERM on the leader between launches", STOPS, "asked to end", 20, True),
    Fault("sigterm_while_decoding", "SIGTERM on the leader in a round's last launch", STOPS, "", 20),
    Fault("sigterm_while_auditing", "SIGTERM on one host during the audit", STOPS, "", 20),
    Fault("sigterm_while_reporting", "SIGTERM on the leader while it reports", STOPS, "", 20),
    Fault("sigterm_while_a_report_hangs", "SIGTERM on the leader while a metric hangs", SAVED, "is not done", 15),
    Fault("sigterm_while_saving", "SIGTERM on one host during the last save", SAVED, "", 20),
    Fault("a_launch_of_one_host", "one host launches a program that others do not", EXITS, "Launch ", 20, True),
    Fault("wandb_is_missing", "wandb is not installed", EXITS, "cannot be imported", 10),
    Fault("follower_config_file_differs", "a host has another configuration file", EXITS, "'config'", 60),
    Fault("a_host_is_too_late", "a host comes after timeout_s", EXITS, "timed out after 2 s", 30),
    Fault("a_host_stalls_during_decode", "a host stalls in Python between launches", EXITS, "stalling", 30),
    Fault("a_host_dies_before_generation", "a host dies (SIGKILL) before a round", EXITS, "Missing: process", 15),
    Fault("a_host_dies_during_generation", "a host dies during generation", EXITS, "Missing: process", 15, True),
    Fault("a_host_dies_after_generation", "a host dies in training", EXITS, "Missing: process", 15, True),
    Fault("the_leader_dies", "process 0 dies, at any time", EXITS, "Missing: process 0", 10, True),
]
