"""Rows without a model."""

from lockstep.report import Row


def row(text, **values):
    """A row of training in which what is not given is made up."""
    made_up = {"step": 1, "prompt_id": 0, "generation_id": 0, "prompt": "What?", "num_tokens": 4}
    made_up |= {"finish_reason": "stop", "mean_logprob": -0.5}
    return Row(generated_text=text, **made_up | values)
