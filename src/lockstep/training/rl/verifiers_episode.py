"""An episode of verifiers in this process: its program is a chat loop, whose calls of the model are turns."""

import asyncio
import contextlib
import copy
import functools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from verifiers.v1.graph import prepare_turn
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession

from lockstep.errors import ConfigError
from lockstep.printable import without_secrets
from lockstep.text import split_calls
from lockstep.training.rl.environment import Message, Reply

_MODEL = "lockstep"


@functools.lru_cache(maxsize=4)
def load_tasks(settings: str) -> tuple[Any, list[vf.Task]]:
    """Return the configuration and the tasks of an environment of verifiers, by its settings as JSON.

    Raises:
        ConfigError: There is no such environment, or it has not one agent, which is the model.
    """
    try:
        fields = json.loads(settings)
        config = vf.resolve_env_config({"taskset": fields["taskset"]})
        agents = [name for name, value in config if isinstance(value, vf.AgentConfig)]
        if agents == ["agent"]:  # any other environment refuses the settings of that agent
            config = vf.resolve_env_config(fields)
        environment = vf.load_environment(config)
        tasks = list(environment.taskset)
    except Exception as error:  # the package is somebody's own
        raise ConfigError(
            f"environment: verifiers cannot load {settings} ({type(error).__name__}: {error}). Correct taskset and "
            "settings; on every host, install the package of the taskset or put its module beside the configuration."
        ) from error
    if agents != ["agent"]:
        raise ConfigError(
            f"environment: {type(environment).__name__} of the taskset {fields['taskset']['id']} has the agents "
            f"{', '.join(agents)}; only one, the model, is trained. Use a taskset of verifiers with one agent."
        )
    return config, tasks


def describe_tools(settings: str) -> list[Mapping[str, Any]]:
    """Return the schemas of the tools of the first task, as chat templates read them."""
    config, tasks = load_tasks(settings)
    return asyncio.run(Tools(config, tasks[0]).schemas()) if tasks else []


def first_messages(task: vf.Task) -> tuple[Message, ...]:
    """Return the messages that a task begins with."""
    return tuple(map(_written, _opening(task.data.system_prompt, task.data.prompt)))


class Tools:
    """The tools of a task, called in this process."""

    def __init__(self, config: Any, task: vf.Task) -> None:
        taskset = vf.load_taskset(config.taskset)
        self._toolsets = [*type(taskset).toolsets(config.taskset), *task.toolsets(task.config)]
        self._servers: dict[str, MCPServer] = {}
        for toolset in self._toolsets:
            if getattr(toolset.config, "url", None):
                raise ConfigError(
                    f"environment: the tools {type(toolset).__name__} of verifiers are at {toolset.config.url}; only "
                    "those that run in this process can be called. Leave their url out."
                )
            self._servers[toolset.server_name] = server = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)

    async def begin(self, task: vf.Task, trace: vf.Trace) -> None:
        """Set the tools up for a task; they share the state of its trace."""

        async def state() -> Any:
            return trace.state

        async def ignore(before: bytes) -> None:
            """Leave the state as it is: the trace has the same object."""

        for toolset in self._toolsets:
            toolset._pull_state, toolset._push_state = state, ignore
            await toolset.setup()
            await toolset.setup_task(task.data)

    async def schemas(self) -> list[Mapping[str, Any]]:
        """Return the schema of each tool, as chat templates read it."""
        functions = [
            {"name": _joined(name, tool.name), "description": tool.description, "parameters": tool.input_schema}
            for name, server in self._servers.items()
            for tool in await server.list_tools()
        ]
        return [{"type": "function", "function": function} for function in functions]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool says, or what is wrong with the call."""
        for prefix, server in self._servers.items():
            for tool in await server.list_tools():
                if _joined(prefix, tool.name) == name:
                    try:
                        result = await server.call_tool(tool.name, dict(arguments))
                    except ToolError as error:
                        return without_secrets(f"error: {error}")
                    return "\n".join(part.text for part in result.content if part.type == "text")
        return f"error: there is no tool {name!r}"


def _joined(prefix: str, name: str) -> str:
    """The name of a tool as the harnesses of verifiers advertise it."""
    return f"{prefix}_{name}" if prefix else name


class Episode:
    """A task of verifiers that the model works on; its coroutines run in one event loop.

    Args:
        settings: Those of `load_tasks`.
        number: The number of the task.
    """

    def __init__(self, settings: str, number: int) -> None:
        self._config, tasks = load_tasks(settings)
        self._task, self._tools = tasks[number], Tools(self._config, tasks[number])
        self._asked: asyncio.Queue[Sequence[vf.Message]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._messages: list[vf.Message] = []  # all that was said, in order
        self._traces: list[vf.Trace] = []
        self._sessions: dict[str, RolloutSession] = {}
        self._playing = asyncio.create_task(self._play())

    async def next_messages(self) -> Reply:
        """Wait for the messages that the model is to answer next, or for the reward.

        Raises:
            RuntimeError: A hook or the scoring of verifiers has failed.
        """
        asked = asyncio.create_task(self._asked.get())
        await asyncio.wait({asked, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return await self._playing
        known = len(self._messages)
        messages = list(asked.result())
        if messages[:known] != self._messages:
            raise ValueError(
                f"{type(self._task).__name__} has rewritten what was said before, and only what follows can be read: "
                f"{messages[:known]!r:.200}"
            )
        self._messages = messages
        return Reply(messages=[_written(message) for message in messages[known:]])

    def answer(self, text: str) -> None:
        """Give the program the answer that it waits for."""
        self._answers.put_nowait(text)

    def end(self) -> None:
        """Have the program end without another answer."""
        for trace in self._traces:
            trace.stop("max_output_tokens")
        self._answers.put_nowait("")

    def cancel(self) -> None:
        """End it without a reward."""
        self._playing.cancel()

    async def _play(self) -> Reply:
        environment = vf.load_environment(self._config)
        setup, loop, desk = environment.setup, _ChatLoop(self), _Desk(self._sessions)

        async def seat(agents: Any) -> None:
            await setup(agents)
            agents.agent.harness, agents.agent.interception = loop, desk

        environment.setup = seat
        task = copy.copy(self._task)
        task.toolsets = lambda config: []  # verifiers would start a server for each
        context = vf.ModelContext(model=_MODEL, client=vf.EvalClientConfig())
        episode = await environment.run_episode(task, context, on_trace=self._traces.append)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        (trace,) = episode.traces
        scores = {**trace.metrics, **{name: reward.score for name, reward in trace.rewards.items()}}
        metrics = {name: score for name, score in scores.items() if score is not None}
        return Reply(reward=trace.reward, done=True, metrics=metrics)

    async def loop(self, trace: vf.Trace, system: str | None, prompt: Any) -> None:
        """Talk to the model until an answer calls no tool, or a limit or a ``@stop`` ends the run."""
        session, messages = self._sessions[trace.id], _opening(system, prompt)
        if trace.num_turns == 0:
            await self._tools.begin(self._task, trace)
        tools = [vf.Tool(**schema["function"]) for schema in await self._tools.schemas()]
        while await session.refused() is None:
            request, records, stop = await session.rewrite_request(vf.Request(messages=messages, tools=tools or None))
            trace.request_rewrites.extend(records)
            if stop is not None:
                trace.stop(stop)
            else:
                turn = prepare_turn(trace, request.messages, request.tools)
                self._asked.put_nowait(request.messages)
                text = await self._answers.get()
            if session.stopped:
                return
            response, records, stop = await session.rewrite_response(_response(text, trace.num_turns))
            if records:
                raise ValueError(f"{records[0].handler} rewrites what the model has said, which is what it learns from")
            node = turn.commit(response)
            self._messages = messages = [*request.messages, response.message]
            stop = stop or await session.gate_tool_calls(node)
            if stop is not None:
                trace.stop(stop)
                return
            if not response.message.tool_calls:
                return
            for call in response.message.tool_calls:
                content = await self._tools.call(call.name, json.loads(call.arguments))
                messages = [*messages, vf.ToolMessage(tool_call_id=call.id, name=call.name, content=content)]


class _ChatLoop(vf.Harness):
    """The program of an episode."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    def __init__(self, episode: Episode) -> None:
        super().__init__(vf.HarnessConfig(id="null"))
        self._episode = episode

    async def launch(
        self, ctx: Any, trace: vf.Trace, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        await self._episode.loop(trace, *self.resolve_prompt(data))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class _Desk(Interception):
    """The sessions of the runs of an episode, by their traces, in place of a server at which programs ask."""

    def __init__(self, sessions: dict[str, RolloutSession]) -> None:
        super().__init__()
        self._sessions = sessions

    async def start(self) -> None:
        """Do nothing: there is no server."""

    @contextlib.asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        self._sessions[session.trace.id] = session
        try:
            yield "http://localhost", "", ""
        finally:
            session.release()


def _opening(system: str | None, prompt: Any) -> list[vf.Message]:
    """The messages of a request: of a text, or of messages, after those of the system."""
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
    return [*([vf.SystemMessage(content=system)] if system else []), *messages]


def _response(text: str, turn: int) -> vf.Response:
    """An answer as a client of verifiers returns it; a call that cannot be read is text, as servers of models do it."""
    parts = split_calls(text)
    calls = [
        vf.ToolCall(id=f"call_{turn}_{number}", name=part.call.name, arguments=json.dumps(dict(part.call.arguments)))
        for number, part in enumerate(parts)
        if part.call is not None
    ]
    message = vf.AssistantMessage(
        content="".join(part.text for part in parts if part.kind != "reasoning" and part.call is None),
        reasoning_content="\n".join(part.text for part in parts if part.kind == "reasoning") or None,
        tool_calls=calls or None,
    )
    return vf.Response(id="", created=0, model=_MODEL, message=message, finish_reason="tool_calls" if calls else "stop")


def _written(message: Any) -> Message:
    """A message of verifiers as a chat template reads it."""
    written = message.model_dump(exclude_none=True, exclude={"tool_call_id"})
    if isinstance(written.get("content"), list):
        written["content"] = "\n".join(part.text for part in message.content if part.type == "text")
    return written
