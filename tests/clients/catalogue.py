"""The client libraries: what each installs, and the script that uses it (docs/guides/clients.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
CHECKS = ("chat", "stream", "tools", "structured")  # every script has these, and may have more


@dataclass(frozen=True, slots=True)
class Client:
    """A library. script: in `SCRIPTS`; a name in .mjs is run by node, and its packages come from npm."""

    name: str
    script: str
    packages: tuple[str, ...]

    @property
    def is_javascript(self) -> bool:
        """Whether node runs it."""
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai", "use_openai.py", ("openai==3.54.0",)),
    Client("openai-js", "use_openai.mjs", ("openai@7.57.0", "zod@4.6.7")),
    Client("anthropic", "use_anthropic.py", ("anthropic==2.14.0",)),
    Client("langchain", "use_langchain.py", ("langchain==1.4.7", "langchain-openai==1.7.3")),
    Client("llama-index", "use_llama_index.py", ("llama-index-llms-openai-like==0.8.1",)),
    Client("litellm", "use_litellm.py", ("litellm[mcp]==1.106.2",)),
    Client("instructor", "use_instructor.py", ("instructor==1.17.0",)),
    Client("openai-agents", "use_openai_agents.py", ("openai-agents==0.24.0",)),
    Client("pydantic-ai", "use_pydantic_ai.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("autogen", "use_autogen.py", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")),
    Client("vercel-ai", "use_vercel_ai.mjs", ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")),
)
