"""Engines of rollouts that launch nothing."""

import dataclasses

from lockstep.hosts import Ledger
from lockstep.types import FinishReason
from tests import tiny
from tests.unit.training.rl.made_up import completion


class Parrot:
    """An engine that launches nothing; each answer says which one it is."""

    def __init__(self):
        self.ledger, self.calls = Ledger(), []

    def free_bytes(self, model):
        return 7

    def check(self, model, requests):
        self.calls.append(("check", len(requests)))

    def prepare(self, model, requests, *, free):
        self.calls.append(("prepare", len(requests), free))
        return {"parrot": "0"}

    def stream(self, model, requests, *, find_stop, gate):
        config, weights = model
        assert config == tiny.CONFIG and weights.embed.shape[1] == tiny.CONFIG.hidden_dim
        for request in requests:
            self.calls.append(("stream", request.prompt_id))
            yield [
                completion(request.prompt_id, generation, [5 + request.prompt_id, 5 + generation])
                for generation in range(request.params.n_generations)
            ]


class Cut(Parrot):
    """Answers of which some were cut at the limit: those of the first generation, or all."""

    def __init__(self, cut):
        super().__init__()
        self.cut = cut

    def stream(self, model, requests, **options):
        for answered in super().stream(model, requests, **options):
            yield [
                dataclasses.replace(
                    each, finish_reason=FinishReason.LENGTH if each.generation_id in self.cut else FinishReason.STOP
                )
                for each in answered
            ]


class Looping(Parrot):
    """Answers of which the first of each question is one token for ever, until it is cut."""

    def stream(self, model, requests, **options):
        for answered in super().stream(model, requests, **options):
            loop = completion(answered[0].prompt_id, 0, [9] * 30, FinishReason.LENGTH)
            yield [loop, *answered[1:]]
