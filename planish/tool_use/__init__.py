"""Tools for language models: typed Python functions that a policy may call, and the environment in
which it does.
"""

from planish.tool_use.agent_env import (
    AgentToolMessageEnv,
    RewardFn,
    RewardResult,
    build_agent_tool_env,
)
from planish.tool_use.toolbox import CallResult, Toolbox
from planish.tool_use.tools import (
    FunctionTool,
    Tool,
    ToolInput,
    ToolResult,
    error_tool_result,
    simple_tool_result,
    tool,
)

__all__ = [
    "AgentToolMessageEnv",
    "CallResult",
    "FunctionTool",
    "RewardFn",
    "RewardResult",
    "Tool",
    "ToolInput",
    "ToolResult",
    "Toolbox",
    "build_agent_tool_env",
    "error_tool_result",
    "simple_tool_result",
    "tool",
]
