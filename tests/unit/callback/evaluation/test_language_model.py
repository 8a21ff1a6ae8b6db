"""What the harness is told: log-probabilities and texts against full forward passes, on one device."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from lockstep.callback.evaluation import TasksConfig
from lockstep.engine import Engine, EngineConfig
from lockstep.errors import ConfigError, PromptError
from lockstep.models import as_trainable
from lockstep.placement import make_mesh
from lockstep.text import ModelLimits, StopFinder, cut_at_stop, decode
from lockstep.types import Request, SamplingParams
from tests import tiny
from tests.oracle import oracle_completions

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow
LENGTH = 24
"""Tokens that fit, of question and answer together."""
LIMITS = ModelLimits(rows=tiny.vocab_size(), max_seq_len=LENGTH)


@pytest.fixture(scope="module")
def model():
    mesh = make_mesh("1,1,1", jax.devices()[:1])
    return as_trainable(tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size()))


@pytest.fixture(scope="module")
def lm(model):
    from lockstep.callback.evaluation.language_model import EngineLM

    engine = Engine(
        EngineConfig(max_seq_len=32, page_size=8, max_seqs=4, max_prefill_size=32),
        make_mesh("1,1,1", jax.devices()[:1]),
    )

    def ask(requests, last):
        return engine.generate(model, requests, find_stop=StopFinder(tiny.tokenizer()))

    return EngineLM(
        tiny.tokenizer(), ask, TasksConfig(names=["own"], max_new_tokens=4), LIMITS, lambda: ["loglikelihood"]
    )


def instance(*args):
    return types.SimpleNamespace(args=args, task_name="own")


def expected(model, context, continuation):
    """The log-probability of tokens after others, and whether each is the most probable, from whole forward passes."""
    params = SamplingParams(max_new_tokens=1)
    prefixes = [(*context, *continuation[:at]) for at in range(len(continuation))]
    asked = [Request(prompt_id=at, prompt_tokens=prefix, params=params) for at, prefix in enumerate(prefixes)]
    total, greedy = 0.0, True
    for token, one in zip(continuation, oracle_completions(model, asked), strict=True):
        scores = one.scores[0].astype(np.float64)
        total += scores[token] - scores.max() - np.log(np.sum(np.exp(scores - scores.max())))
        greedy &= bool(scores.argmax() == token)
    return total, greedy


def test_log_probabilities_are_those_of_a_forward_pass(model, lm):
    tokenizer = tiny.tokenizer()
    best = decode(tokenizer, oracle_completions(model, [request(lm.tok_encode("What is"))])[0].tokens)
    pairs = [("What is 12 plus 7?", " nineteen"), ("", "one two"), ("What is", best)]
    found = lm.loglikelihood([instance(*pair) for pair in pairs])
    encoded = [lm._encode_pair(*pair) for pair in pairs if pair[0]]
    encoded.insert(1, ([lm.prefix_token_id], lm.tok_encode(pairs[1][1], add_special_tokens=False)))
    for (logprob, greedy), (context, continuation) in zip(found, encoded, strict=True):
        want, is_best = expected(model, context, continuation)
        assert logprob == pytest.approx(want, abs=1e-4) and greedy == is_best
    assert [greedy for _, greedy in found] == [False, False, True]


def request(tokens):
    return Request(prompt_id=0, prompt_tokens=tuple(tokens), params=SamplingParams(max_new_tokens=1))


def test_a_long_text_is_scored_in_windows_that_predict_each_token_once(model, lm):
    text = (
        "What is 12 plus 7? nineteen. What is 40 in words? forty. What is 3 plus 4? It is seven, is it not? Yes, seven."
    )
    tokens = lm.tok_encode(text)
    assert len(tokens) > 2 * LENGTH
    before = lm.truncated
    (found,) = lm.loglikelihood_rolling([instance(text)])
    assert lm.truncated == before
    # Windows of all but two tokens; each window's last token is predicted from what came before it.
    size, total, at = LENGTH - 2, 0.0, 0
    while at < len(tokens):
        end = min(at + size, len(tokens))
        context = [lm.prefix_token_id] if at == 0 else tokens[max(0, end - size - 1) : at]
        total += expected(model, context, tokens[at:end])[0]
        at = end
    assert found == pytest.approx(total, abs=1e-3)


def test_a_text_that_the_tokenizer_begins_has_a_second_beginning_only_where_that_is_wanted(model, lm, caplog):
    from lockstep.callback.evaluation.language_model import EngineLM

    class Beginning(type(lm.tokenizer)):
        """A tokenizer that puts its token for the beginning before a text, as Llama's does."""

        def encode(self, text, add_special_tokens=True, **more):
            rest = super().encode(text, add_special_tokens=False, **more)
            return [self.bos_token_id, *rest] if add_special_tokens else rest

    tokenizer = tiny.tokenizer()
    tokenizer.__class__ = Beginning
    tokenizer.bos_token = tokenizer.eos_token
    rest = tokenizer.encode("What is 12 plus 7?", add_special_tokens=False)
    for single, context in ((False, [tokenizer.bos_token_id] * 2), (True, [tokenizer.bos_token_id])):
        config = TasksConfig(names=["own"], single_bos=single)
        own = EngineLM(
            tokenizer, lm._ask, config, dataclasses.replace(LIMITS, max_seq_len=32), lambda: ["loglikelihood_rolling"]
        )
        caplog.clear()
        (logprob, _) = own.loglikelihood_rolling([instance("What is 12 plus 7?")] * 2)
        # The harness predicts each token of the text, so also the tokenizer's own beginning.
        first = 0.0 if single else expected(model, context[:1], context[1:])[0]
        assert logprob == pytest.approx(first + expected(model, context, rest)[0], abs=1e-3)
        warnings = [record.message for record in caplog.records]
        assert len(warnings) == (not single) and all("tasks.single_bos: true leaves one" in each for each in warnings)


def test_answers_are_those_of_greedy_decoding_up_to_a_stop_string(model, lm):
    tokenizer, text = tiny.tokenizer(), "What is 12 plus 7?"
    (whole,) = lm.generate_until([instance(text, {"until": "<eos>", "max_gen_toks": 6, "temperature": 0.0})])
    params = SamplingParams(max_new_tokens=6, stop_token_ids=(tokenizer.eos_token_id,))
    asked = Request(prompt_id=0, prompt_tokens=tuple(lm.tok_encode(text)), params=params)
    assert whole == decode(tokenizer, oracle_completions(model, [asked])[0].tokens)
    stop = whole[3:5]
    assert lm.generate_until([instance(text, {"until": [stop], "max_gen_toks": 6})]) == [cut_at_stop(whole, [stop])]
    assert lm._params({}, "own", 20).max_new_tokens == 4, "the configuration's"


def test_what_is_left_out_is_counted(lm):
    before = lm.truncated
    lm.generate_until([instance("one " * LENGTH, {"max_gen_toks": 20}), instance("one", {"max_gen_toks": 20})])
    assert lm.truncated == before + 1
    lm.loglikelihood([instance("one " * LENGTH, " two")])
    assert lm.truncated == before + 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, (0.7, 0.9, None)),
        ({"do_sample": True}, (1.0, 1.0, None)),
        ({"do_sample": False, "temperature": 0.7, "top_k": 3}, (0.0, 1.0, None)),
        ({"temperature": 0.5, "top_k": 3}, (0.5, 1.0, 3)),
        ({"temperature": None, "top_k": 3}, (0.0, 1.0, None)),
    ],
)
def test_generation_arguments(lm, arguments, wanted):
    params = lm._params(arguments, "own", 20)
    assert (params.temperature, params.top_p, params.top_k) == wanted


def test_an_argument_that_is_not_known_is_refused(lm):
    with pytest.raises(ConfigError, match="task 'own' has the generation argument 'num_beams', which is not known"):
        lm.generate_until([instance("one", {"num_beams": 4})])


@pytest.mark.parametrize("around", ["$A <eos>", "$A", "<eos> $A <eos>"])
def test_an_end_that_the_tokenizer_appends_is_not_between_question_and_answer(around):
    tokenizer = tiny.tokenizer()
    processor = TemplateProcessing(single=around, special_tokens=[("<eos>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = processor
    from lockstep.callback.evaluation.language_model import EngineLM

    lm = EngineLM(tokenizer, lambda *_: [], TasksConfig(names=["own"]), LIMITS, lambda: ["loglikelihood"])
    plain = tokenizer.encode("one two", add_special_tokens=False)
    before = [tokenizer.eos_token_id] if around.startswith("<eos>") else []
    assert lm.tok_encode("one two") == [*before, *plain] and lm.tok_encode("one two", False) == plain
    context, continuation = lm._encode_pair("one", " two")
    assert context + continuation == [*before, *plain] and continuation


def test_a_token_that_the_model_does_not_have_is_named_with_its_question_in_a_line():
    from lockstep.callback.evaluation.language_model import EngineLM

    tokenizer = tiny.tokenizer()
    question = "one\nTwo"
    last = max(tokenizer.encode(question))
    small = EngineLM(
        tokenizer,
        lambda *_: pytest.fail("the model was asked"),
        TasksConfig(names=["own"]),
        ModelLimits(rows=last, max_seq_len=LENGTH),
        lambda: ["loglikelihood"],
    )
    for ask in (small.generate_until, small.loglikelihood_rolling):
        arguments = (question, {}) if ask == small.generate_until else (question,)
        with pytest.raises(
            PromptError, match=rf"a question of the tasks \({ask.__name__}\), 'one↵Two.*\(id {last}\)"
        ) as caught:
            ask([instance(*arguments)])
        assert "\n" not in str(caught.value)
