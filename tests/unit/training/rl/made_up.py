"""Questions, answers and rows without a model."""

from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason


def prompt(answer="1 + 1 = 2\n#### 2"):
    return Prompt(id=0, text="q", answer=answer)


def completion(place, generation, tokens, finish_reason=FinishReason.STOP):
    logprobs = tuple(-0.5 - token for token in tokens)
    return Completion(
        prompt_id=place,
        generation_id=generation,
        tokens=tuple(tokens),
        logprobs=logprobs,
        sampled_logprobs=tuple(2 * each for each in logprobs),
        finish_reason=finish_reason,
    )
