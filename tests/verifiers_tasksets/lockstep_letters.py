"""A taskset of verifiers that any text is an answer to: its environment replies with a number of letters."""

import asyncio

import verifiers.v1 as vf

FAILURES: dict[int, str] = {}
"""How tasks fail in this process, by their numbers: ``raise`` or ``hang``."""


class LettersState(vf.State):
    turns: int = 0


class Letters(vf.Task[vf.TaskData, LettersState, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        match FAILURES.get(self.data.idx):
            case "raise":
                raise OSError("no such world")
            case "hang":
                await asyncio.sleep(60)

    @vf.reward
    async def parity(self, trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return float(said.count("e") % 2 == 0) - 0.01 * len(said)


class LettersTaskset(vf.Taskset[Letters]):
    def load(self):
        for number in range(8):
            yield Letters(vf.TaskData(prompt=f"How many letters has {number}?"), self.config.task)


class LettersEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                segment = await interaction.turn(f"{segment.last_reply.count('e')} e?")


__all__ = ["LettersTaskset", "LettersEnv"]
