"""A taskset of verifiers whose environment has two agents."""

import verifiers.v1 as vf


class Motions(vf.Taskset[vf.Task[vf.TaskData]]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Is it?"), self.config.task)


class DebateConfig(vf.EnvConfig):
    pro: vf.AgentConfig = vf.AgentConfig()
    contra: vf.AgentConfig = vf.AgentConfig()


class Debate(vf.Env[DebateConfig]):
    async def run(self, task, agents):
        await agents.pro.run(task)
        await agents.contra.run(task)


__all__ = ["Motions", "Debate"]
