"""The clients: what each installs, the script that uses it, and what that checks (docs/guides/clients.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
TALK = ("chat", "stream", "tools", "tools_streamed")


@dataclass(frozen=True, slots=True)
class Client:
    """A client. script: in `SCRIPTS`; a name in .mjs is run by node, and its packages come from npm.

    checks: that the script runs, in their order.
    """

    name: str
    script: str
    packages: tuple[str, ...]
    checks: tuple[str, ...]

    @property
    def is_javascript(self) -> bool:
        """Whether node runs it."""
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai", "use_openai.py", ("openai==3.57.0",), (*TALK, "structured", "responses")),
    Client(
        "openai-js",
        "use_openai.mjs",
        ("openai@7.59.0", "zod@4.6.7"),
        (*TALK, "tools_run", "structured", "responses"),
    ),
    Client(
        "anthropic",
        "use_anthropic.py",
        ("anthropic==2.14.0",),
        (*TALK, "structured", "tokens_counted", "errors", "models"),
    ),
    Client(
        "langchain",
        "use_langchain.py",
        ("langchain==1.5.2", "langchain-openai==1.7.4"),
        (*TALK, "agent", "structured"),
    ),
    Client(
        "llama-index",
        "use_llama_index.py",
        ("llama-index-llms-openai-like==0.8.1",),
        (*TALK, "structured"),
    ),
    Client("litellm", "use_litellm.py", ("litellm[mcp]==1.110.2",), (*TALK, "structured", "too_long")),
    Client("instructor", "use_instructor.py", ("instructor==1.17.0",), ("chat", "stream", "tools", "structured")),
    Client("openai-agents", "use_openai_agents.py", ("openai-agents==0.24.0",), (*TALK, "loop", "structured")),
    Client(
        "pydantic-ai",
        "use_pydantic_ai.py",
        ("pydantic-ai-slim[openai]==2.68.0",),
        (*TALK, "typed_loop", "structured"),
    ),
    Client("haystack", "use_haystack.py", ("haystack-ai==3.4.1",), (*TALK, "agent", "pipeline", "structured")),
    Client("smolagents", "use_smolagents.py", ("smolagents[openai]==1.26.0",), (*TALK, "agent", "structured")),
    Client(
        "autogen",
        "use_autogen.py",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        (*TALK, "agent", "structured"),
    ),
    Client(
        "vercel-ai",
        "use_vercel_ai.mjs",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
        (*TALK, "structured"),
    ),
    Client(
        "claude-code",
        "use_claude_code.mjs",
        ("@anthropic-ai/claude-code@2.1.332", "@modelcontextprotocol/sdk@1.32.2", "zod@4.6.7"),
        ("chat", "stream", "agent", "tools", "structured", "tokens_counted"),
    ),
    Client(
        "lm-eval",
        "use_lm_eval.py",
        ("lm-eval[api]==0.4.13",),
        ("tokenizer", "generate", "chat", "loglikelihood", "greedy", "batches", "rolling"),
    ),
    # The build of torch that the engine is tested with: without a pin, one for GPUs comes, of several GiB.
    Client("guidellm", "use_guidellm.py", ("guidellm==0.8.1", "torch==2.13.0"), ("chat", "completions", "responses")),
    Client(
        "aiperf",
        "use_aiperf.py",
        ("aiperf==0.13.0",),
        ("chat", "chat_streamed", "completions", "responses", "messages"),
    ),
)
