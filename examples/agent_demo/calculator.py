"""An environment of ``train-grpo``: a calculator that the model may call before it answers.

In the configuration, with this file beside it: ``environment: {type: "calculator:Calculator", max_turns: 3}``.
"""

import ast
import dataclasses
import operator
import re

from lockstep.training import ToolEnvironment

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value_of(node):
    """The value of a sum, difference or product of whole numbers; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only +, - and * of whole numbers are known")


def calculator(expression: str) -> int:
    """Compute the value of an expression.

    Args:
        expression: Whole numbers with +, - and * between them, such as 12 + 7.
    """
    if len(expression) > 50:
        raise ValueError(f"the expression has {len(expression)} characters, at most 50 are read")
    return value_of(ast.parse(expression.strip(), mode="eval").body)


@dataclasses.dataclass(kw_only=True)
class Calculator(ToolEnvironment):
    """Calls of `calculator` are computed; the last number of the answer that calls nothing has to be right."""

    def tools(self):
        """Return the one function that the model may call."""
        return [calculator]

    async def reset(self, question):
        """Begin with the question."""
        self.answer = question.answer.rpartition("####")[2].strip()
        return await super().reset(question)

    async def score(self, answer):
        """Return 1 for the right number, else 0."""
        return float(re.findall(r"-?\d+", answer)[-1:] == [self.answer])
