"""States of sequences with linear attention: slots that are used again, prompts of any length, what is ruled out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.engine.decoder.states import state_spec
from lockstep.errors import ConfigError
from lockstep.models import find_preset, load_hf
from lockstep.models.check_reader import LEAST_TOLERANCE
from lockstep.types import Drafts, Request, SamplingParams
from tests.numpy_forward import forward
from tests.unit.engine.models import mesh_of

GOLDEN = Path(__file__).parents[3] / "golden" / "qwen3_next"


def prompts(*lengths: int, **params: Any) -> list[Request]:
    tokens = np.random.default_rng(3).integers(0, 118, 64)
    return [
        Request(prompt_id=number, prompt_tokens=tuple(tokens[:length].tolist()), params=SamplingParams(**params))
        for number, length in enumerate(lengths)
    ]


@pytest.mark.slow
def test_every_sequence_has_a_state_of_its_own_whoever_had_its_slot_before() -> None:
    """One prompt is in one page, others go over several launches of prefill; equal prompts are prefilled each."""
    config = lockstep.EngineConfig(page_size=4, max_seqs=2, max_prefill_size=8, max_steps_per_launch=3)
    engine = lockstep.Engine(config, mesh_of("1,1,1"))
    requests = prompts(1, 19, 4, 5, 2, 1, 13, max_new_tokens=7, n_generations=2)
    answers = engine.generate(load_hf(str(GOLDEN), mesh_of("1,1,1")), requests)
    assert len(answers) == 14
    for answer in answers:
        prompt = requests[answer.prompt_id].prompt_tokens
        logits = forward(GOLDEN, np.array([(*prompt, *answer.tokens)]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(answer.tokens), (answer.prompt_id, answer.generation_id)
        logprobs = logits.max(-1) - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=LEAST_TOLERANCE)


def test_sizing_says_what_a_state_rules_out_and_prompts_have_no_logprobs() -> None:
    model = load_hf(str(GOLDEN), mesh_of("1,1,1"))
    engine = lockstep.Engine(lockstep.EngineConfig(), mesh_of("1,1,1"))
    drafted = [
        Request(
            prompt_id=0, prompt_tokens=(1, 2), params=SamplingParams(max_new_tokens=4), drafts=Drafts(answers=((3, 4),))
        )
    ]
    sizing = engine.predict(model, drafted, free=1 << 30)
    assert "a state of 4 heads of 6 x 10 in 3 layers" in sizing.kept
    assert "prefixes are not shared; drafts are not verified" in sizing.kept
    assert not sizing.shares_prefixes and not sizing.sizes.draft_tokens
    with pytest.raises(ConfigError, match="prompt_logprobs of prompt 0 is true; the model has linear attention"):
        engine.predict(model, prompts(3, max_new_tokens=2, prompt_logprobs=True), free=1 << 30)


def test_the_state_of_a_published_model_has_the_bytes_of_its_paper() -> None:
    """32 heads of 128 x 128 in float32, and 3 positions of 8,192 numbers in bfloat16; a half on each of two devices."""
    preset = find_preset("qwen3-next-80b-a3b")
    assert preset is not None
    for tensor in (1, 2):
        state = state_spec(preset.config, tensor, np.dtype("bfloat16"))
        assert state is not None and state.bytes == (32 * 128 * 128 * 4 + 3 * 8192 * 2) // tensor
