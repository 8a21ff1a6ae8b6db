import dataclasses

import numpy as np

from lockstep.training.rl.rewarding import Scoring
from lockstep.training.rl.sampled import Sampled, completions_of
from lockstep.types import FinishReason, RoutedExperts
from tests.saved_states import as_saved
from tests.unit.training.rl.made_up import completion


def test_a_checkpoint_keeps_every_answer_bit_for_bit():
    values = [completion(0, 0, [7, 3]), completion(0, 1, []), completion(1, 0, [9], FinishReason.LENGTH)]
    odd = float(np.float32(0.1))
    values.append(dataclasses.replace(values[0], prompt_id=1, generation_id=1, logprobs=(-odd, -1e-30)))
    values[2:] = [dataclasses.replace(each, routed_experts=RoutedExperts((2, 1, 2), bytes(8))) for each in values[2:]]
    before = Sampled(number=3, questions=[5, 2], completions=values, scoring=Scoring({}, workers=0))
    kept = as_saved(before.state())
    assert kept["number"] == 3 and kept["questions"] == [5, 2]
    assert completions_of(kept) == values
