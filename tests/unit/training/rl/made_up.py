"""Questions, answers and rows without a model."""

from lockstep.report import Row
from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason


def row(text, num_tokens=4, finish_reason="stop"):
    return Row(
        step=1,
        prompt_id=0,
        generation_id=0,
        prompt="q",
        generated_text=text,
        num_tokens=num_tokens,
        finish_reason=finish_reason,
        mean_logprob=-1.0,
    )


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
