"""The ``tasks`` block: which tasks of lm-evaluation-harness, and within which limits."""

import dataclasses

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError, check_at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), extra ``[eval]``."""

    names: list[FilePath] = dataclasses.field(default_factory=list)
    """Tasks, groups or tags by the harness's names, or the paths of task files (YAML). Empty: no tasks."""
    task_dir: FilePath | None = None
    """A directory with task files of your own, which are looked through first; on the leader alone."""
    every: int | None = None
    """Run the tasks after the rounds of samples at every so many completed steps, and after the one that the end of
    training forces (``at_end``). Null: after every round."""
    num_fewshot: int | None = None
    """Solved questions before each question, for tasks that do not say 0 themselves. Null: as the task says."""
    limit: int | None = None
    """Questions per task at most, its first ones. Null: all."""
    apply_chat_template: bool = False
    """Ask as a chat, through the tokenizer's chat template."""
    max_new_tokens: int = 256
    """Tokens of an answer at most, where the task does not say."""
    max_seq_len: int | None = None
    """Tokens of question and answer together. As in the harness, the beginning of a longer question is left out; how
    many were is counted in ``eval/truncated_requests``. Null: what the model was built for."""
    single_bos: bool = False
    """In `loglikelihood_rolling`, whether a text that the tokenizer begins with its token for the beginning gets no
    second one. False: as the harness does, whose own models put it before every text."""
    max_seconds: float | None = None
    """Seconds that hosts may spend on a round of tasks; then it is given up on all of them. Compiling counts. Null: 900
    in training, and as long as it takes in ``lockstep eval``."""

    def __post_init__(self) -> None:
        check_fields(self, "tasks.")
        names: object = self.names
        if isinstance(names, str):
            raise ConfigError(f"tasks.names is {names!r}; it must be a list. Use [{names!r}].")
        if not all(self.names):
            raise ConfigError("tasks.names has an empty name. Name a task there, or remove it.")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"tasks.names has a task twice: {', '.join(self.names)}. Name each once.")
        for field in dataclasses.fields(self):
            if not self.names and field.name != "names" and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"tasks.{field.name} is {getattr(self, field.name)!r} and tasks.names is empty, so that it has no "
                    "effect. Name a task, or remove it."
                )
        check_at_least(self, 1, "max_new_tokens", block="tasks.")
        check_at_least(self, 1, "every", "limit", block="tasks.", fix=", or null.")
        check_at_least(self, 0, "num_fewshot", block="tasks.", fix=", or null.")
        check_at_least(self, 2, "max_seq_len", block="tasks.", fix=", or null.")
        check_at_least(self, 0, "max_seconds", block="tasks.", fix=", or null.", above=True)

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a round after a step has the tasks with it."""
        return bool(self.names) and (last or self.every is None or step % self.every == 0)
