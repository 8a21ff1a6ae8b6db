"""Sampled answers as the rows that rewards and tables read."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.report import Row
from lockstep.text import Prompt, cut_at_stop, decode
from lockstep.training.rl.questions import Questions
from lockstep.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRows:
    """Makes rows of answers.

    Args:
        questions: All questions.
        tokenizer: The tokenizer that turns tokens into text.
        stop: The texts that end an answer.
    """

    questions: Questions
    tokenizer: "PreTrainedTokenizerBase"
    stop: Sequence[str]

    def row(self, step: int, question: int, completion: Completion) -> tuple[Row, Prompt]:
        """Return an answer as a row, and its question.

        Args:
            step: The number of completed steps when it has been learned from.
            question: The number of the question.
            completion: The answer.
        """
        prompt = self.questions.prompts[question]
        text = cut_at_stop(decode(self.tokenizer, completion.tokens), self.stop)
        row = Row.from_completion(completion, prompt, text, step=step)
        return dataclasses.replace(row, prompt_id=prompt.id), prompt
