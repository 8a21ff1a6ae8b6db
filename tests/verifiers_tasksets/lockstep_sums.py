"""A taskset of verifiers with local data: sums, a calculator, a stop and a hook."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumState(vf.State):
    added: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, SumState]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two whole numbers."""
        self.state.added += 1
        return a + b


class SumsConfig(vf.TasksetConfig):
    count: int = 3


class Sum(vf.Task[SumData, SumState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    async def setup(self, trace, runtime):
        if self.data.idx == 1:
            raise OSError("no such world")

    @vf.stop
    async def many_calls(self, trace: vf.Trace) -> bool:
        return trace.state.added > 2

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(task.answer in (trace.assistant_messages[-1].content or ""))

    @vf.reward(weight=-0.5)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

    @vf.metric
    async def calls(self, trace) -> float:
        return float(trace.state.added)


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for number in range(self.config.count):
            data = SumData(prompt=f"What is {number} + 2?", system_prompt="Add.", answer=f"It is {number + 2}.")
            yield Sum(data, self.config.task)


__all__ = ["Sums"]
