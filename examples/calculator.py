"""An environment of ``train-grpo``: a calculator that the model may use before it answers.

In the configuration, with this file beside it: ``environment: {type: "calculator:Calculator", max_turns: 3}``.
"""

import ast
import dataclasses
import operator
import re

from lockstep.training import Environment, Reply

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value_of(node):
    """The value of a sum, difference or product of whole numbers; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only +, - and * of whole numbers are known")


@dataclasses.dataclass(kw_only=True)
class Calculator(Environment):
    """``calc(12 + 7)`` in an answer is computed; an answer without is the last, and is compared with the reference."""

    bonus: float = 0.1  # reward of a calculation that can be done

    async def reset(self, question):
        """Begin with the question, and a word on the calculator."""
        self.answer = question.answer.rpartition("####")[2].strip()
        return [{"role": "user", "content": f"{question.shown} You may write calc(...) once, and read the result."}]

    async def step(self, message):
        """Compute, or end the conversation."""
        call = re.search(r"calc\(([^()]{1,50})\)", message["content"])
        if call is None:
            numbers = re.findall(r"-?\d+", message["content"])
            return Reply(reward=float(numbers[-1:] == [self.answer]), done=True)
        try:
            result, reward = str(value_of(ast.parse(call[1].strip(), mode="eval").body)), self.bonus
        except (ValueError, SyntaxError) as error:
            result, reward = f"error: {error}", 0.0
        return Reply(messages=[{"role": "user", "content": f"= {result}"}], reward=reward)
