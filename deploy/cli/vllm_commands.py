"""What to do here for subcommands of `vllm`, and for environment variables of its server, that are none of ours.

Source: https://docs.vllm.ai/en/latest/cli and https://docs.vllm.ai/en/latest/configuration/env_vars. Each text is one
sentence, and what it names is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from typer.core import TyperGroup

from deploy.cli.wrong_values import say_what_works

API_KEY = "VLLM_API_KEY"
LEAVE_OUT = "it is not needed"
BY_RAY = "Ray finds addresses and ports (`ray start --node-ip-address`, --link-host)"
COMMANDS: Mapping[str, str] = {
    "bench": "Point `vllm bench serve --base-url URL`, guidellm or aiperf at the server: it has OpenAI's API",
    "collect-env": "Use `squadron doctor`, and `squadron version`",
    "complete": "Use `squadron chat`, or POST to /v1/completions",
    "launch": "Use `squadron serve`: its routers render and tokenize apart from the replicas",
    "run-batch": "Use `squadron batch INPUT OUTPUT --model MODEL`: it reads the same rows",
}
VARIABLES: Mapping[str, str] = {
    API_KEY: "set SQUADRON_API_KEY, or give --api-key",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "raise max_position_embeddings with --hf-overrides",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters are not served: merge them into the weights",
    "VLLM_ATTENTION_BACKEND": "use --attention-backend",
    "VLLM_BATCH_INVARIANT": "use --batch-invariant",
    "VLLM_CACHE_ROOT": "set HF_HOME, where models are kept",
    "VLLM_CONFIGURE_LOGGING": "use --log-format",
    "VLLM_CPU_KVCACHE_SPACE": "use --kv-cache-memory-bytes, such as 4G",
    "VLLM_CPU_OMP_THREADS_BIND": "use --cpu-omp-threads-bind",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "use --step-timeout",
    "VLLM_HOST_IP": BY_RAY,
    "VLLM_LOGGING_CONFIG_PATH": "use --log-format json, and --verbose for Ray's own logs",
    "VLLM_LOGGING_LEVEL": "use --enable-log-requests for requests, and --verbose for Ray's own logs",
    "VLLM_NO_USAGE_STATS": "nothing is ever sent: leave it out",
    "VLLM_PLUGINS": "name a package's parser in --tool-call-parser or --reasoning-parser",
    "VLLM_PORT": BY_RAY,
    "VLLM_TORCH_PROFILER_DIR": "`py-spy` and `nsys` look at running ranks from outside",
    "VLLM_USE_MODELSCOPE": "download the model, and give its folder",
    "VLLM_USE_V1": LEAVE_OUT,
    "VLLM_WORKER_MULTIPROC_METHOD": LEAVE_OUT,
}


class SquadronCommands(TyperGroup):
    """The subcommands; of one that only vLLM has, it says what to do here."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, as usual."""
        name = args[0] if args else ""
        if name in COMMANDS and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command '{name}'. {COMMANDS[name]}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, as usual; say what works where a value or a flag does not."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            say_what_works(error)
            raise


def variable_notes(names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each variable of vLLM's that is set and not read here."""
    for name in sorted(names):
        yield f"{name} is not read: {VARIABLES.get(name, 'docs/guides/from-vllm.md says what is')}."
