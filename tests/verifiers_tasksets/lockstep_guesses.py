"""A taskset of verifiers and its environment of several turns: a number is guessed, and each guess is answered."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    answer: int = 0


class Guess(vf.Task[GuessData]):
    @vf.reward
    async def guessed(self, task, trace) -> float:
        return float(trace.assistant_messages[-1].content == str(task.answer))


class Guesses(vf.Taskset[Guess]):
    def load(self):
        yield Guess(GuessData(prompt="Guess a number.", answer=7), self.config.task)


class GuessEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.answer):
                guess = int(segment.last_reply)
                segment = await interaction.turn("More." if guess < task.data.answer else "Less.")


__all__ = ["Guesses", "GuessEnv"]
