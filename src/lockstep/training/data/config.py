"""Which data to train on and to validate with: text, prompts with completions, chats and preference pairs."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import jax
import numpy as np

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError, PeerError, check_at_least, refuse_keys
from lockstep.hosts import Hosts, MemoryClient
from lockstep.limits import LINE_BYTES
from lockstep.plugins import load_object
from lockstep.printable import without_credentials
from lockstep.storage import storage_wait
from lockstep.text import token_count, tokenizer_digest
from lockstep.training.data.build import BadRowPolicy, build_caches
from lockstep.training.data.chunk_builder import CacheSpec
from lockstep.training.data.examples import FORMATS, DataFormat
from lockstep.training.data.packing import ExampleKind, RowShape
from lockstep.training.data.records import SourceConfig, SourceFile, list_files
from lockstep.training.data.rows import CachedRows
from lockstep.training.data.token_cache import TokenCache
from lockstep.training.objectives import DESIRABLE, REFERENCE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which files to train on, and how long a row is."""

    CROSS_ENTROPY: ClassVar[bool] = False
    """Whether the loss on this data is a mean over tokens, of which the exponential is the perplexity."""

    train_urls: tuple[FilePath | SourceConfig, ...] = ()
    """Files to train on: paths or URLs that fsspec knows (``gs://``, ``hf://``), wildcards allowed. JSON lines and
    text, also compressed (.gz, .zst), Parquet, and directories of ``Dataset.save_to_disk``. As soon as one has a
    weight (``{url, weight}``), each is a source of its own in a mixture; otherwise all together are one source."""
    validation_urls: tuple[FilePath | SourceConfig, ...] = ()
    """Files to validate with, each a source with metrics of its own, ``eval/<name>/loss``; see
    ``trainer.steps_per_eval``."""
    cache_dir: FilePath | None = None
    """The directory or URL of the tokenised cache, shared by the hosts so that each builds a part of it; null:
    ``token-cache`` in ``trainer.checkpointer.base_path`` where that is a URL, else ``lockstep/data`` below
    ``$XDG_CACHE_HOME`` or ``~/.cache``. Every later run finds it there."""
    max_seq_len: int | None = None
    """Tokens of a row; null: the model's ``max_seq_len``."""
    length_buckets: tuple[int, ...] = ()
    """Lengths of shorter rows, such as ``[128, 256]``: every batch has rows of one length, the shortest that holds its
    examples, or of ``max_seq_len``. The train step is compiled once for each length, before the first step. For rows
    that are not packed; empty: all rows have ``max_seq_len``."""
    truncate: bool = False
    """Cut examples that are longer than a row (an example left without a target is dropped, and counted in the log);
    otherwise a longer example is a bad row."""
    on_bad_row: Literal["skip", "raise"] = "skip"
    """The treatment of a record that cannot be used: leave it out and log its file, line and reason, or stop."""
    max_bad_rows: int = 100
    """The most records of a source that may be left out; with more the run stops, and names the first."""
    max_line_bytes: int = LINE_BYTES
    """The most bytes of a JSON line; a longer one is a bad row, and is not read whole."""
    require_end_token: bool = True
    """Refuse answers of which none trains a token that generation stops at; false: a warning says so."""
    shuffle: bool = True
    """Draw every epoch in another order."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        check_at_least(self, 2, "max_seq_len", block="data.", fix=". Raise it, or use null.")
        buckets = self.length_buckets
        if any(length < 2 for length in buckets) or list(buckets) != sorted(set(buckets)):
            raise ConfigError(
                f"data.length_buckets is {list(buckets)}; the lengths must be at least 2 and ascend. Correct them."
            )
        check_at_least(self, 0, "max_bad_rows", block="data.")
        check_at_least(self, 1, "max_line_bytes", block="data.")
        if any(isinstance(source, SourceConfig) and source.weight is not None for source in self.validation_urls):
            raise ConfigError("data.validation_urls has a weight, which has no effect there. Remove it.")
        names = [source.label for source in self._validation]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"data.validation_urls has the name {twice[0]!r} twice. Write {{url, name}} to give each its own."
            )

    def row_length(self, model_max_seq_len: int) -> int:
        """The number of tokens of a row: ``max_seq_len``, or the model's where that is null."""
        if self.max_seq_len is None:
            return model_max_seq_len
        if self.max_seq_len > model_max_seq_len:
            raise ConfigError(
                f"data.max_seq_len is {self.max_seq_len}, but the model's max_seq_len is {model_max_seq_len}. Set "
                f"it to at most {model_max_seq_len}, or use a model that is built for longer sequences."
            )
        return self.max_seq_len

    def row_lengths(self, model_max_seq_len: int) -> tuple[int, ...]:
        """Return the number of tokens of a row of each bucket, ascending."""
        longest = self.row_length(model_max_seq_len)
        if self.length_buckets and self.length_buckets[-1] >= longest:
            raise ConfigError(
                f"data.length_buckets is {list(self.length_buckets)}, but the longest rows have {longest} tokens, and "
                "the list is of shorter ones. Leave out what is not below that, or raise data.max_seq_len."
            )
        return (*self.length_buckets, longest)

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and type of one row of each column that ``load`` makes, the longest where rows have several
        lengths, without reading any data.
        """
        row = (self.row_lengths(model_max_seq_len)[-1],)
        return {"tokens": jax.ShapeDtypeStruct(row, np.int32), "loss_mask": jax.ShapeDtypeStruct(row, np.bool_)}

    def load(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model_max_seq_len: int,
        seed: int,
        hosts: Hosts | None = None,
        vocab_size: int | None = None,
    ) -> CachedRows:
        """Tokenise the data that is not in the cache yet, and open the cache. Every host makes this call.

        Args:
            hosts: The hosts that make this call together; None for this one alone.
            vocab_size: The number of rows of the model's embedding; None: its tokens are not checked.

        Raises:
            ConfigError: A file or too many records cannot be used; the message names their places.
            PeerError: The same, where hosts are given; raised on all of them.
        """
        groups, weights = self._sources()
        caches = self._open(groups, tokenizer, self.row_lengths(model_max_seq_len), hosts, vocab_size)
        return CachedRows(caches, weights, seed, self.shuffle)

    def load_validation(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        model_max_seq_len: int,
        hosts: Hosts | None = None,
        vocab_size: int | None = None,
    ) -> dict[str, TokenCache]:
        """Open the validation data; arguments and errors are those of `load`. Every host makes this call.

        Returns:
            The rows of each source by its name, in the order of the files; empty without ``validation_urls``.
        """
        if not self.validation_urls:
            return {}
        groups = [(f"data.validation_urls ({source.label})", [source.url]) for source in self._validation]
        # One program validates: all rows have its length.
        caches = self._open(groups, tokenizer, (self.row_length(model_max_seq_len),), hosts, vocab_size)
        return {source.label: cache for source, cache in zip(self._validation, caches, strict=True)}

    @property
    def example_kind(self) -> ExampleKind:
        """The kind of the examples."""
        return "documents" if self._rows()[0].documents else "answers"

    @property
    def _validation(self) -> list[SourceConfig]:
        return [url if isinstance(url, SourceConfig) else SourceConfig(url=url) for url in self.validation_urls]

    def _rows(self) -> tuple[DataFormat, bool]:
        """The format of the records, and whether rows are packed."""
        raise ConfigError(f"{type(self).__name__} has no rows of its own: its rows are sampled while it trains.")

    def specs(
        self, tokenizer: "PreTrainedTokenizerBase", model_max_seq_len: int, vocab_size: int | None = None
    ) -> list[CacheSpec]:
        """Return the files of each source, and how `load` makes rows of them.

        Raises:
            ConfigError: There is no file, or the tokenizer cannot be used.
        """
        return self._specs(self._sources()[0], tokenizer, self.row_lengths(model_max_seq_len), vocab_size)

    def _sources(self) -> tuple[list[tuple[str, list[str]]], list[float]]:
        """The files of each source after its name, and its weight."""
        sources = [url if isinstance(url, SourceConfig) else SourceConfig(url=url) for url in self.train_urls]
        if any(source.weight is not None for source in sources):
            weights = [1.0 if source.weight is None else source.weight for source in sources]
            return [(f"data.train_urls ({source.label})", [source.url]) for source in sources], weights
        return [("data.train_urls", [source.url for source in sources])], [1.0]

    def _specs(
        self,
        groups: Sequence[tuple[str, Sequence[str]]],
        tokenizer: "PreTrainedTokenizerBase",
        lengths: tuple[int, ...],
        vocab_size: int | None,
    ) -> list[CacheSpec]:
        def looked_for(url: str, name: str) -> list[SourceFile]:
            with storage_wait(f"looking for the files of {without_credentials(url)}"):
                return list_files(url, name)

        if not all(urls for _, urls in groups):
            raise ConfigError(
                "data.train_urls is empty; at least 1 file is needed. List files, e.g. [data/train.jsonl]."
            )
        format, packing = self._rows()
        format.check(tokenizer)
        shape = RowShape(
            length=lengths[-1],
            truncate=self.truncate,
            packing=packing,
            documents=format.documents,
            pairs=format.pairs,
            shorter=lengths[:-1],
        )
        limited, digest = (vocab_size or 1 << 31) < token_count(tokenizer), tokenizer_digest(tokenizer)
        return [
            CacheSpec(
                name=name,
                files=tuple(file for url in urls for file in looked_for(url, name.partition(" ")[0])),
                format=format,
                shape=shape,
                tokenizer_digest=digest,
                vocab_size=vocab_size if limited else None,
                max_line_bytes=self.max_line_bytes,
                embedding=vocab_size,
            )
            for name, urls in groups
        ]

    def _open(
        self,
        groups: Sequence[tuple[str, Sequence[str]]],
        tokenizer: "PreTrainedTokenizerBase",
        lengths: tuple[int, ...],
        hosts: Hosts | None,
        vocab_size: int | None,
    ) -> list[TokenCache]:
        make_specs = functools.partial(self._specs, groups, tokenizer, lengths, vocab_size)
        policy = BadRowPolicy(on_bad_row=self.on_bad_row, max_bad_rows=self.max_bad_rows)
        if hosts is not None:
            return build_caches(make_specs, tokenizer, self.cache_dir, policy, hosts)
        try:
            return build_caches(make_specs, tokenizer, self.cache_dir, policy, Hosts(MemoryClient.hub(1)[0]))
        except PeerError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmDataConfig(DataConfig):
    """The data of `train-lm`."""

    CROSS_ENTROPY: ClassVar[bool] = True

    format: str = "text"
    """``text``: field ``text``, documents of which every token but the first is a target. ``prompt_completion``: fields
    ``prompt`` and ``completion``. ``chat``: field ``messages``, of which the last is the assistant's.
    ``module:name``: a `DataFormat` of your own (docs/data.md), whose module is imported when this is read."""
    train_on: Literal["last", "all"] = "last"
    """Which of the assistant's messages of a chat are targets: the ``last``, or ``all``. ``all`` needs a chat template
    that writes a message the same whatever follows; a chat that it writes otherwise is a bad row."""
    packing: bool | None = None
    """Put several examples into a row, numbered by ``segment_ids``, which keep them apart in attention: documents one
    after the other, cut where a row ends; others as a whole where they fit. null: documents yes, others no."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_format.preferences:
            raise ConfigError(f"data.format is {self.format!r}, whose examples are preferences. Use train-preference.")
        if self.train_on == "all" and self.format != "chat":
            raise ConfigError(
                f"data.train_on is all and data.format is {self.format}, which has no turns. Remove it, or use format: "
                "chat."
            )
        if self.data_format.documents and not self.require_end_token:
            raise ConfigError("data.require_end_token is false, and documents have no answers to end. Remove it.")
        if self.length_buckets and self.packs:
            raise ConfigError(
                f"data.length_buckets is {list(self.length_buckets)}, but rows are packed, and a packed row is full. "
                "Remove it, or set data.packing: false."
            )

    @property
    def packs(self) -> bool:
        """Whether a row holds several examples."""
        return self.data_format.documents if self.packing is None else self.packing

    @property
    def data_format(self) -> DataFormat:
        """The format of the records."""
        data_format = DataFormat.find(self.format, ("text", "prompt_completion", "chat"))
        return FORMATS["chat_all"] if self.train_on == "all" else data_format

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        columns = super().columns(model_max_seq_len)
        if self.packs:
            columns["segment_ids"] = jax.ShapeDtypeStruct(columns["tokens"].shape, np.int32)
        return columns

    def _rows(self) -> tuple[DataFormat, bool]:
        return self.data_format, self.packs


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(DataConfig):
    """The data of `train-preference`: pairs in the chat format of UltraFeedback-binarized, with the fields ``chosen``
    and ``rejected``, each a list of ``{role, content}`` that ends with the assistant's answer, before it the prompt,
    unless a ``prompt`` has its messages; or single answers with a label.
    """

    format: str = "preference"
    """``preference``: the fields above. ``preference_with_reference``: also ``ref_chosen_logps`` and
    ``ref_rejected_logps``, the log-probability of each answer under a reference model, for a loss that needs one.
    ``unpaired_preference``, for ``kto``: ``prompt`` and ``completion``, texts or lists of messages, and ``label``,
    whether the completion is desirable. ``module:name``: a `DataFormat` of your own with ``pairs`` or ``labels``, whose
    module is imported when this is read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data_format.preferences:
            raise ConfigError(f"data.format is {self.format!r}, whose examples are no preferences. Use train-lm.")
        if self.data_format.reference and self.truncate:
            raise ConfigError(
                f"data.truncate is true and data.format is {self.format}, whose log-probabilities are those of whole "
                "answers. Remove data.truncate, or use format: preference."
            )

    @property
    def data_format(self) -> DataFormat:
        """The format of the records."""
        return DataFormat.find(self.format, ("preference", "preference_with_reference", "unpaired_preference"))

    def columns(self, model_max_seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        single = super().columns(model_max_seq_len)
        if self.data_format.labels:
            return {**single, DESIRABLE: jax.ShapeDtypeStruct((), np.bool_)}
        columns = {name: jax.ShapeDtypeStruct((2, *struct.shape), struct.dtype) for name, struct in single.items()}
        if self.data_format.reference:
            columns[REFERENCE] = jax.ShapeDtypeStruct((2,), np.float32)
        return columns

    def _rows(self) -> tuple[DataFormat, bool]:
        return self.data_format, False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoDataConfig(DataConfig):
    """The data of `train-grpo`: records with a question and its reference answer, as GSM8K has them, read whole by
    every host. A row has prompt and sampled answer together, at most ``max_seq_len`` tokens; ``truncate`` leaves out
    the questions that leave too little room for an answer. Held-out questions are those of ``inference_eval``.
    """

    on_bad_row: Literal["skip", "raise"] = "raise"
    REFUSED: ClassVar[Mapping[str, str]] = {
        "validation_urls": "Give held-out questions to inference_eval.prompts, with inference_eval.metrics: [gsm8k].",
        "length_buckets": "Its rows have one length. Remove it.",
        "cache_dir": "Questions are not cached. Remove it.",
        "require_end_token": "Nothing of the data is a target. Remove it.",
    }

    format: str = "chat"
    """``chat``: the question is the user's message, through the tokenizer's chat template. ``text``: the model goes on
    from the question itself. ``module:name``: a function of your own that makes a `lockstep.text.Prompt` of a record;
    what it returns is the question."""
    question_field: str = "question"
    """The field of a record with the question, a text."""
    answer_field: str = "answer"
    """The field of a record with the reference answer, a text. All other fields reach rewards as ``prompt.fields``."""
    system_prompt: str | None = None
    """The system's message before the question, with ``format: chat``; null: none."""
    instruction: str = ""
    """Text after each question, such as how to write the final answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.system_prompt is not None and self.format == "text":
            raise ConfigError(
                "data.system_prompt is given and data.format is text, which has no system message. Use format: chat, "
                "or put the text into data.instruction."
            )
        refuse_keys(self, "train-grpo", "data.")
        if ":" in self.format:
            load_object(self.format, "data.format")
            for name in ("question_field", "answer_field", "system_prompt", "instruction"):
                if getattr(self, name) != getattr(GrpoDataConfig, name):
                    raise ConfigError(
                        f"data.{name} is {getattr(self, name)!r}, which has no effect with data.format "
                        f"{self.format!r}, a function that makes the whole prompt. Remove it."
                    )
        elif self.format not in ("chat", "text"):
            raise ConfigError(f"data.format is {self.format!r}; it must be chat, text, or module:name of your own.")
        if any(isinstance(source, SourceConfig) and source.weight is not None for source in self.train_urls):
            raise ConfigError("data.train_urls has a weight, which has no effect in train-grpo. Remove it.")

    @property
    def example_kind(self) -> ExampleKind:
        """Questions: an answer in the data is compared with, and never trained."""
        return "questions"
