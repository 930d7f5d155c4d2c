"""What to do here for flags of `vllm serve`, and arguments of its `LLM`, that are none of ours, grouped as there.

Source: https://docs.vllm.ai/en/latest/cli/serve; tests/deploy/cli/vllm_flags.json lists them all. Each text is one
sentence, and what it names is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do in place of a flag.

    holds: values of it that ask for what is so here anyway, and are taken. on / off: whether the same is true of the
    flag without a value, and of `--no-...`. needs: a flag that must be given with it to be taken.
    """

    text: str
    holds: tuple[str, ...] = ()
    on: bool = False
    off: bool = False
    needs: str | None = None

    def allows(self, value: Any) -> bool:
        """Whether a value, as a file or Python has it, asks for what is so here anyway."""
        if isinstance(value, bool):
            return self.on if value else self.off
        return str(value) in self.holds


NEVER_RUN = "A checkpoint's code is never run: docs/reference/support.md lists the supported models"
TEXT_ONLY = "Models read and write text alone: leave it out"
NO_DRAFTS = "There is no speculative decoding: leave it out"
ONE_SCHEDULER = "Each replica schedules alone: --replicas says how many there are"
BY_RAY = "Start Ray on each host (`ray start`) and set RAY_ADDRESS: Ray places the ranks"
IN_FRONT = "TLS ends at an ingress or a reverse proxy in front"
NO_EXCHANGE = "KV blocks stay with the replica that computed them: routers send prompts to where their prefix is"
NO_OFFLOAD = "Weights stay on GPUs: --quantization makes them smaller, --tensor-parallel-size splits them"
NO_SWAP = "KV blocks stay on GPUs: --kv-cache-dtype fp8 holds twice the tokens"
CHOSEN = "Kernels are chosen for the device and the model: leave it out"
STATES = "States of recurrent layers are kept as --state-snapshot-blocks and --num-state-snapshots say"
PACKED = "Weights are read from safetensors files, each rank its own part: leave it out"
NO_CLASSES = "No classes are loaded into the server: leave it out"
PARSERS = "Install a package that offers the parser as an entry point (docs/guides/tools.md), and name it in"
OWN_METRICS = "docs/reference/metrics.md lists the metrics, which are all on: leave it out"
NO_PROFILER = "`py-spy` and `nsys` look at running ranks from outside: leave it out"
NO_DBO = "Steps are not cut into two batches: leave it out"
NO_BALANCE = "Experts stay on the ranks that loaded them: leave it out"
NO_CONTEXT_PARALLEL = "A context is not split over ranks: --tensor-parallel-size splits its heads"
REPLICAS = "Use --replicas: routers spread requests over them"
REQUEST_USAGE = "A request asks for usage in its stream with stream_options.include_usage"
NO_ACCESS_LOG = "Connections are not logged: --enable-log-requests logs requests"
NO_ADAPTERS = "Adapters are not served: merge them into the weights"
GRAMMARS = "Grammars are always xgrammar's: leave it out"
ONE_PREFILL = "Use --long-prefill-token-threshold: it caps what a long prompt takes of a step"
ROPE = """Use --hf-overrides, such as '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'"""
ONE_STEP = "Each step is scheduled by itself, while the one before it runs: leave it out"
MODEL_RUNS = "Ranks are always actors of Ray, on hosts that RAY_ADDRESS leads to"

MODEL = {
    "--task": Advice("Each decoder generates and embeds: leave it out", holds=("auto", "generate", "embed")),
    "--runner": Advice("Each decoder generates and embeds: leave it out", holds=("auto", "generate")),
    "--convert": Advice("Each decoder embeds at /v1/embeddings: leave it out", holds=("auto", "none", "embed")),
    "--tokenizer-mode": Advice("Tokenizers are read as the transformers library does", holds=("auto", "hf")),
    "--trust-remote-code": Advice(NEVER_RUN, off=True),
    "--hf-config-path": Advice("Use --hf-overrides: it changes what the model's config.json says"),
    "--allowed-local-media-path": Advice(TEXT_ONLY),
    "--allowed-media-domains": Advice(TEXT_ONLY),
    "--code-revision": Advice(NEVER_RUN),
    "--tokenizer-revision": Advice("Give the tokenizer with its revision: --tokenizer NAME@REVISION"),
    "--quantization-config": Advice("Use --quantization, and --quantization-group-size for int4"),
    "--allow-deprecated-quantization": Advice("--quantization lists what is read: leave it out", off=True),
    "--enable-return-routed-experts": Advice("Answers do not tell which experts ran: leave it out", off=True),
    "--return-sampling-mask": Advice("A request asks for logprobs: leave it out", off=True),
    "--logprobs-mode": Advice("Logprobs are those of the model, before penalties", holds=("raw_logprobs",)),
    "--use-fp64-gumbel": Advice("Noise is exact enough in the type that is used: leave it out", off=True),
    "--enable-trace-replay": Advice("Tokens cannot be given for a request to draw: leave it out", off=True),
    "--disable-sliding-window": Advice("Windows are kept as the model has them: lower --max-model-len to the window"),
    "--disable-cascade-attn": Advice("There is no cascade attention", on=True),
    "--skip-tokenizer-init": Advice("Routers need the tokenizer: prompts may still be token ids", off=True),
    "--enable-prompt-embeds": Advice("Prompts are texts or token ids: leave it out", off=True),
    "--config-format": Advice("Models are read in the format of Hugging Face", holds=("auto", "hf")),
    "--hf-token": Advice("Set HF_TOKEN, or log in with `hf auth login`"),
    "--model-class-overrides": Advice(NO_CLASSES),
    "--pooler-config": Advice("Use --embedding-pooling last or mean"),
    "--sleep-mode-backend": Advice("Memory is given back by torch: leave it out", holds=("cumem",)),
    "--sleep-mode-offload-cudagraph": Advice("Graphs are dropped for sleep and captured again: leave it out"),
    "--sleep-preserve-parameter-names": Advice("`LLM.sleep` keeps all parameters by name: leave it out"),
    "--enable-cumem-allocator": Advice("Memory is allocated by torch: leave it out", off=True),
    "--enable-nccl-comm-suspend": Advice("NCCL stays as it is while the engine sleeps: leave it out", off=True),
    "--logits-processors": Advice("Requests have logit_bias, bad_words, allowed_token_ids and structured_outputs"),
    "--io-processor-plugin": Advice(NO_CLASSES),
    "--renderer-num-workers": Advice("Use --routers: each renders and tokenizes in threads of its own"),
}
LOAD = {
    "--load-format": Advice("Weights are read from safetensors files", holds=("auto", "safetensors", "hf")),
    "--download-dir": Advice("Set HF_HOME, or give the model's folder"),
    "--safetensors-load-strategy": Advice(PACKED, holds=("lazy",)),
    "--safetensors-prefetch-num-threads": Advice(PACKED),
    "--safetensors-prefetch-block-size": Advice(PACKED),
    "--model-loader-extra-config": Advice(PACKED),
    "--ignore-patterns": Advice("Only safetensors and texts are fetched: leave it out"),
    "--use-tqdm-on-load": Advice("Progress is shown on a terminal", on=True),
    "--pt-load-map-location": Advice("Pickled weights are never read: convert them to safetensors"),
}
ATTENTION_AND_MAMBA = {
    "--mamba-backend": Advice(CHOSEN),
    "--mamba-ssu-algorithm": Advice(CHOSEN),
    "--enable-mamba-cache-stochastic-rounding": Advice(STATES, off=True),
    "--mamba-cache-philox-rounds": Advice(STATES),
    "--gdn-prefill-backend": Advice(CHOSEN),
    "--kda-prefill-backend": Advice(CHOSEN),
    "--kda-decode-backend": Advice(CHOSEN),
    "--attention-config": Advice("Use --attention-backend"),
}
STRUCTURED = {
    "--reasoning-parser-plugin": Advice(f"{PARSERS} --reasoning-parser"),
    "--guided-decoding-backend": Advice("It is always xgrammar", holds=("auto", "xgrammar")),
    "--structured-outputs-config": Advice(GRAMMARS),
}
PARALLEL = {
    "--distributed-executor-backend": Advice(MODEL_RUNS, holds=("ray",)),
    "--pipeline-parallel-size": Advice(
        "Layers are not spread over stages: use --tensor-parallel-size, across hosts too", holds=("1",)
    ),
    "--master-addr": Advice(BY_RAY),
    "--master-port": Advice(BY_RAY),
    "--nnodes": Advice(BY_RAY, holds=("1",)),
    "--node-rank": Advice(BY_RAY, holds=("0",)),
    "--distributed-timeout-seconds": Advice("Use --step-timeout: a collective that takes longer ends its replica"),
    "--cpu-distributed-timeout-seconds": Advice(
        "Use --step-timeout: a collective that takes longer ends its replica"
    ),
    "--numa-bind": Advice("Use --cpu-omp-threads-bind auto on a CPU; ranks on GPUs are not bound", off=True),
    "--numa-bind-nodes": Advice("Use --cpu-omp-threads-bind with CPUs of those nodes"),
    "--numa-bind-cpus": Advice("Use --cpu-omp-threads-bind"),
    "--device-ids": Advice("Set CUDA_VISIBLE_DEVICES before Ray starts: Ray gives each rank one of those GPUs"),
    "--decode-context-parallel-size": Advice(NO_CONTEXT_PARALLEL, holds=("1",)),
    "--dcp-comm-backend": Advice(NO_CONTEXT_PARALLEL),
    "--dcp-q-replicate": Advice(NO_CONTEXT_PARALLEL),
    "--dcp-kv-cache-interleave-size": Advice(NO_CONTEXT_PARALLEL),
    "--cp-kv-cache-interleave-size": Advice(NO_CONTEXT_PARALLEL),
    "--prefill-context-parallel-size": Advice(NO_CONTEXT_PARALLEL, holds=("1",)),
    "--data-parallel-size": Advice("Use --replicas", holds=("1",)),
    "--data-parallel-rank": Advice(REPLICAS),
    "--data-parallel-start-rank": Advice(REPLICAS),
    "--data-parallel-size-local": Advice(REPLICAS),
    "--data-parallel-address": Advice(BY_RAY),
    "--data-parallel-rpc-port": Advice(BY_RAY),
    "--data-parallel-backend": Advice(MODEL_RUNS, holds=("ray",)),
    "--data-parallel-hybrid-lb": Advice(REPLICAS, off=True),
    "--data-parallel-external-lb": Advice(REPLICAS, off=True),
    "--data-parallel-multi-port-external-lb": Advice(REPLICAS),
    "--dp-sync-interval": Advice(ONE_SCHEDULER),
    "--disable-nccl-for-dp-synchronization": Advice(ONE_SCHEDULER),
    "--enable-hc-sp": Advice("Use --tensor-parallel-size alone: sequences are not split over ranks", off=True),
    "--enable-batch-sharded-sampling": Advice(
        "Ranks draw from their own part of the vocabulary where they can: leave it out"
    ),
    "--enable-ep-weight-filter": Advice("Each rank reads its own experts alone", on=True),
    "--all2all-backend": Advice("--enable-expert-parallel sends rows over NCCL or gloo: leave it out"),
    "--enable-dbo": Advice(NO_DBO, off=True),
    "--ubatch-size": Advice(NO_DBO, holds=("0",)),
    "--dbo-decode-token-threshold": Advice(NO_DBO),
    "--dbo-prefill-token-threshold": Advice(NO_DBO),
    "--enable-shm-tensor-arena": Advice("Ranks of a host share step inputs in memory anyway: leave it out"),
    "--enable-elastic-ep": Advice("Use --max-replicas: whole replicas come and go", off=True),
    "--elastic-ep-max-dp-size": Advice("Use --max-replicas: whole replicas come and go"),
    "--enable-eplb": Advice(NO_BALANCE, off=True),
    "--eplb-config": Advice(NO_BALANCE),
    "--expert-placement-strategy": Advice(NO_BALANCE, holds=("linear",)),
    "--max-parallel-loading-workers": Advice(PACKED),
    "--ray-workers-use-nsight": Advice(NO_PROFILER, off=True),
    "--disable-custom-all-reduce": Advice(
        "Small all-reduces run over symmetric memory where that works, else NCCL: leave it out"
    ),
    "--worker-cls": Advice(NO_CLASSES, holds=("auto",)),
    "--worker-extension-cls": Advice(NO_CLASSES),
    "--enable-fault-tolerance": Advice("Replicas that die are replaced, and their requests go on elsewhere", on=True),
    "--fault-tolerance-config": Advice("Use --stall-timeout, --step-timeout and --no-replica-timeout"),
}
CACHE = {
    "--prefix-caching-hash-algo": Advice("Prefixes are always hashed by BLAKE2b: leave it out"),
    "--prefix-cache-retention-interval": Advice(STATES),
    "--prefix-match-unit": Advice("Prefixes are found in blocks: use --block-size"),
    "--kv-cache-dtype-skip-layers": Advice("Caches of all layers have the type of --kv-cache-dtype"),
    "--kv-sharing-fast-prefill": Advice("Every layer computes the whole prompt: leave it out", off=True),
    "--swa-bounded-replay": Advice("KV blocks of windows are cached like others: leave it out", off=True),
    "--mamba-cache-dtype": Advice(STATES, holds=("auto",)),
    "--mamba-ssm-cache-dtype": Advice(STATES, holds=("auto",)),
    "--mamba-block-size": Advice(STATES),
    "--mamba-cache-mode": Advice(STATES),
    "--enable-mamba-shared-prefix-checkpoint": Advice(STATES, off=True),
    "--replayssm-buffer-len": Advice(STATES),
    "--use-replayssm": Advice(STATES, off=True),
    "--kv-offloading-size": Advice(NO_SWAP),
    "--kv-offloading-backend": Advice(NO_SWAP),
    "--swap-space": Advice("Nothing is swapped: preempted sequences are computed again", holds=("0",)),
}
OFFLOAD = {
    "--offload-backend": Advice(NO_OFFLOAD),
    "--cpu-offload-gb": Advice(NO_OFFLOAD, holds=("0", "0.0")),
    "--cpu-offload-params": Advice(NO_OFFLOAD),
    "--offload-group-size": Advice(NO_OFFLOAD, holds=("0",)),
    "--offload-num-in-group": Advice(NO_OFFLOAD),
    "--offload-prefetch-step": Advice(NO_OFFLOAD),
    "--offload-params": Advice(NO_OFFLOAD),
}
MULTIMODAL = {
    "--language-model-only": Advice("Of a model with images its text half is served", on=True),
    **dict.fromkeys(
        (
            *("--limit-mm-per-prompt", "--enable-mm-embeds", "--media-io-kwargs", "--mm-processor-kwargs"),
            *("--mm-processor-cache-gb", "--mm-processor-cache-type", "--mm-hasher-algorithm"),
            *("--mm-shm-cache-max-object-size-mb", "--mm-encoder-only", "--mm-encoder-tp-mode"),
            *("--mm-encoder-attn-backend", "--mm-encoder-attn-dtype", "--mm-encoder-fp8-scale-path"),
            *("--mm-encoder-fp8-scale-save-path", "--mm-encoder-fp8-scale-save-margin", "--interleave-mm-strings"),
            *("--skip-mm-profiling", "--video-pruning-rate", "--video-pruning-method", "--mm-tensor-ipc"),
            *("--mm-processor-device", "--mm-ipc-gpu-memory-gb", "--mm-device-do-normalize"),
            *("--disable-chunked-mm-input", "--ec-transfer-config", "--ec-manager-config"),
        ),
        Advice(TEXT_ONLY),
    ),
}
LORA = dict.fromkeys(
    (
        *("--enable-lora", "--max-loras", "--max-lora-rank", "--lora-dtype", "--enable-tower-connector-lora"),
        *("--max-cpu-loras", "--fully-sharded-loras", "--lora-target-modules", "--default-mm-loras"),
        *("--specialize-active-lora", "--enable-mixed-moe-lora-format", "--enable-moe-shared-loras"),
        *("--max-lora-cls-labels", "--lora-modules"),
    ),
    Advice(NO_ADAPTERS, off=True),
)
LOGGING = {
    "--logging-config": Advice("Use --log-format json, and --verbose for Ray's own logs"),
    "--log-level": Advice("Use --verbose for Ray's own logs"),
    "--log-config-file": Advice("Use --log-format json, and --verbose for Ray's own logs"),
    "--disable-log-stats": Advice("Statistics are not logged: /metrics has them", on=True),
    "--aggregate-engine-logging": Advice("Statistics are not logged: /metrics sums up all replicas"),
    "--enable-logging-iteration-details": Advice("Steps are not logged: /metrics counts them", off=True),
    "--fail-on-environ-validation": Advice("`squadron doctor` checks the environment", off=True),
}
OBSERVABILITY = {
    "--show-hidden-metrics-for-version": Advice("No metrics are hidden: --metrics-compat vllm adds vLLM's names"),
    "--collect-detailed-traces": Advice("--otlp-traces-endpoint traces every part of a request: leave it out"),
    "--per-request-spec-decode-metrics": Advice(NO_DRAFTS),
    "--kv-cache-metrics": Advice(OWN_METRICS),
    "--kv-cache-metrics-sample": Advice(OWN_METRICS),
    "--custom-histogram-buckets": Advice("Histograms keep their buckets, which the dashboards are made for"),
    "--cudagraph-metrics": Advice(OWN_METRICS),
    "--enable-layerwise-nvtx-tracing": Advice(NO_PROFILER, off=True),
    "--enable-mfu-metrics": Advice(OWN_METRICS),
    "--jit-monitor-mode": Advice("Kernels are compiled in the warm-up: leave it out"),
    "--jit-monitor-verbose": Advice("Kernels are compiled in the warm-up: leave it out"),
    "--profiler-config": Advice(NO_PROFILER),
}
SCHEDULER = {
    "--max-num-scheduled-tokens": Advice("Use --max-num-batched-tokens"),
    "--max-num-active-seqs": Advice("Use --max-num-seqs"),
    "--max-num-queued-reqs": Advice("Use --max-waiting-per-tenant: more get a 429"),
    "--max-num-queued-tokens": Advice("Use --max-queue-wait: who would wait longer gets a 429 at once"),
    "--long-prefill-token-threshold-adaptive": Advice("--long-prefill-token-threshold is a fixed number", off=True),
    "--enable-chunked-prefill": Advice("It is always on: --max-num-batched-tokens is the size of a step", on=True),
    "--scheduler-cls": Advice("Use --scheduling-policy fcfs or priority"),
    "--scheduler-reserve-full-isl": Advice("Admission counts whole prompts: --max-inflight-tokens limits them"),
    "--watermark": Advice("Use --max-num-seqs to keep sequences from preempting each other", holds=("0", "0.0")),
    "--prefill-schedule-interval": Advice(ONE_SCHEDULER, holds=("1",)),
    "--disable-hybrid-kv-cache-manager": Advice("A KV block has a part for every layer, whatever its kind", on=True),
    "--stream-interval": Advice("Tokens are sent as they come", holds=("1",)),
}
COMPILATION = {
    "--max-cudagraph-capture-size": Advice("Use --cudagraph-capture-sizes: the last is the largest"),
    "--max-seq-len-to-capture": Advice(
        "Graphs serve every length: --cudagraph-capture-sizes chooses their batch sizes"
    ),
    "--compilation-config": Advice("Use --cudagraph-capture-sizes, or --enforce-eager for no graphs"),
    "--optimization-level": Advice("Use --enforce-eager for a faster start; all else is always on"),
    "--performance-mode": Advice("Use --max-num-batched-tokens and --max-num-seqs: less is faster for each request"),
    "--ir-op-priority": Advice(CHOSEN),
    "--enable-flashinfer-autotune": Advice(CHOSEN, off=True),
    "--moe-backend": Advice(CHOSEN, holds=("auto",)),
    "--linear-backend": Advice(CHOSEN, holds=("auto",)),
    "--sparse-indexer-topk-backend": Advice(CHOSEN, holds=("auto",)),
    "--kernel-config": Advice(CHOSEN),
    "--monokernel": Advice(CHOSEN, off=True),
}
VLLM = {
    "--speculative-config": Advice("There is no speculative decoding"),
    "--spec-method": Advice(NO_DRAFTS),
    "--spec-model": Advice(NO_DRAFTS),
    "--spec-tokens": Advice(NO_DRAFTS),
    "--watermark-config": Advice("Texts are not watermarked: leave it out"),
    "--diffusion-config": Advice("Models that write by diffusion are not served: docs/reference/support.md"),
    "--kv-transfer-config": Advice(NO_EXCHANGE),
    "--kv-events-config": Advice("Routers hear of KV blocks anyway, for --routing-policy kv_aware: leave it out"),
    "--engram-config": Advice("Models with engrams are not served: docs/reference/support.md"),
    "--reasoning-config": Advice("Use --reasoning-parser"),
    "--additional-config": Advice("Give what it holds by flags of their own, as far as they are here"),
    "--aux-output-config": Advice("A request asks for logprobs or token ids: leave it out"),
    "--weight-transfer-config": Advice("Give the new weights as a folder and update the app: it rolls"),
    "--shutdown-timeout": Advice("Use --drain-timeout"),
    "--watchdog-config": Advice("--step-timeout ends a replica whose rank hangs; `py-spy dump` shows where one is"),
}
FRONTEND = {
    "--headless": Advice(BY_RAY),
    "--grpc": Advice("Use --grpc-port: gRPC is served beside HTTP"),
    "--uds": Advice("The server listens on TCP alone: use --host and --port"),
    "--chat-template-content-format": Advice("Templates get texts", holds=("auto", "string")),
    "--trust-request-chat-template": Advice("Templates of requests are refused: use --chat-template", off=True),
    "--trust-request-mm-kwargs": Advice(TEXT_ONLY, off=True),
    "--default-chat-template-kwargs": Advice("A request sets enable_thinking in chat_template_kwargs"),
    "--reasoning-effort-map": Advice("A chat template gets reasoning_effort as the request has it: --chat-template"),
    "--response-role": Advice("Answers are always of the role assistant", holds=("assistant",)),
    "--return-tokens-as-token-ids": Advice("A request asks for it with the field of that name", off=True),
    "--enable-auto-tool-choice": Advice("--tool-call-parser is enough", on=True, needs="--tool-call-parser"),
    "--exclude-tools-when-tool-choice-none": Advice("The model is never shown tools that it may not use", on=True),
    "--tool-parser-plugin": Advice(f"{PARSERS} --tool-call-parser"),
    "--tool-strict-level": Advice(
        "Arguments match their schema where a request forces a call, strict or not: leave it out", holds=("auto",)
    ),
    "--tool-server": Advice("Clients run tools: answers only call them"),
    "--enable-prompt-tokens-details": Advice("Usage always tells cached tokens", on=True),
    "--enable-per-request-metrics": Advice("Use --otlp-traces-endpoint, or `squadron why` for one request", off=True),
    "--enable-server-load-tracking": Advice("GET /load and /metrics always tell the load", on=True),
    "--enable-force-include-usage": Advice(REQUEST_USAGE, off=True),
    "--sse-keep-alive-interval": Advice("Streams are silent between tokens", holds=("0",)),
    "--enable-tokenizer-info-endpoint": Advice("GET /tokenizer_info is always there", on=True),
    "--enable-log-outputs": Advice("Answers are never logged: leave it out", off=True),
    "--enable-log-deltas": Advice("Answers are never logged: leave it out", off=True),
    "--cohere-is-reasoning-model": Advice("Use --reasoning-parser"),
    "--cohere-format": Advice("Use --chat-template"),
    "--anthropic-disabled-thinking-effort": Advice("A request to /v1/messages turns thinking on or off by itself"),
    "--log-error-stack": Advice("Logs have the stacks of unexpected errors: leave it out", off=True),
    "--tokens-only": Advice("Use --grpc-port: its Generate takes and gives token ids", off=True),
    "--enable-scale-out": Advice(NO_EXCHANGE, off=True),
    "--fingerprint-mode": Advice("Answers have no system_fingerprint", holds=("none",)),
    "--fingerprint-value": Advice("Answers have no system_fingerprint: leave it out"),
    "--data-parallel-supervisor-port": Advice(REPLICAS),
    "--dp-supervisor-probe-interval-s": Advice(REPLICAS),
    "--dp-supervisor-probe-timeout-s": Advice(REPLICAS),
    "--dp-supervisor-probe-failure-threshold": Advice(REPLICAS),
    "--uvicorn-log-level": Advice(NO_ACCESS_LOG, holds=("warning", "error", "critical")),
    "--disable-uvicorn-access-log": Advice(NO_ACCESS_LOG, on=True),
    "--disable-access-log-for-endpoints": Advice(NO_ACCESS_LOG),
    "--allow-credentials": Advice(
        "Browsers send pages' keys in the header Authorization, never cookies: --allowed-origins", off=True
    ),
    "--allowed-methods": Advice("Pages of --allowed-origins may use any method", holds=('["*"]',)),
    "--allowed-headers": Advice("Pages of --allowed-origins may send any header", holds=('["*"]',)),
    "--ssl-keyfile": Advice(IN_FRONT),
    "--ssl-certfile": Advice(IN_FRONT),
    "--ssl-ca-certs": Advice(IN_FRONT),
    "--enable-ssl-refresh": Advice(IN_FRONT, off=True),
    "--ssl-cert-reqs": Advice(IN_FRONT, holds=("0",)),
    "--ssl-ciphers": Advice(IN_FRONT),
    "--middleware": Advice("No code is taken into the server: put a proxy in front"),
    "--enable-request-id-headers": Advice("Answers always have the header x-request-id", on=True),
    "--disable-fastapi-docs": Advice("/docs needs a key where the server has keys: set --api-key", off=True),
    "--enable-offline-docs": Advice("/docs never asks another server for anything", on=True),
    "--h11-max-incomplete-event-size": Advice("Use --max-body-bytes; heads have a fixed limit"),
    "--h11-max-header-count": Advice("Use --max-body-bytes; heads have a fixed limit"),
    "--enable-flash-late-interaction": Advice("Texts are not scored by late interaction: leave it out", off=True),
}
# Of releases before those that the list has; guides still show them.
EARLIER = {
    "--rope-scaling": Advice(ROPE),
    "--rope-theta": Advice(ROPE),
    "--enable-reasoning": Advice("--reasoning-parser is enough", on=True, needs="--reasoning-parser"),
    "--use-v2-block-manager": Advice("There is one block manager: leave it out", on=True),
    "--num-scheduler-steps": Advice(ONE_STEP, holds=("1",)),
    "--multi-step-stream-outputs": Advice(ONE_STEP, on=True),
    "--scheduler-delay-factor": Advice("Prompts never wait for a delay: leave it out", holds=("0", "0.0")),
    "--preemption-mode": Advice("Preempted sequences are computed again", holds=("recompute",)),
    "--worker-use-ray": Advice(MODEL_RUNS, on=True),
    "--engine-use-ray": Advice(MODEL_RUNS, on=True),
    "--cuda-graph-sizes": Advice("Use --cudagraph-capture-sizes"),
    "--max-context-len-to-capture": Advice(
        "Graphs serve every length: --cudagraph-capture-sizes chooses their batch sizes"
    ),
    "--num-speculative-tokens": Advice(NO_DRAFTS),
    "--num-lookahead-slots": Advice(NO_DRAFTS, holds=("0",)),
    "--disable-frontend-multiprocessing": Advice("Routers are always processes of their own: leave it out"),
    "--max-num-partial-prefills": Advice(ONE_PREFILL, holds=("1",)),
    "--max-long-partial-prefills": Advice(ONE_PREFILL, holds=("1",)),
    "--disable-async-scheduling": Advice("Use --no-async-scheduling"),
    "--override-pooler-config": Advice("Use --embedding-pooling last or mean"),
    "--override-attention-dtype": Advice("Use --dtype: attention has the type of the model"),
    "--logits-processor-pattern": Advice(
        "Requests have logit_bias, bad_words, allowed_token_ids and structured_outputs"
    ),
    "--lora-extra-vocab-size": Advice(NO_ADAPTERS),
    "--long-lora-scaling-factors": Advice(NO_ADAPTERS),
    "--enable-prompt-adapter": Advice(NO_ADAPTERS, off=True),
    "--speculative-model": Advice(NO_DRAFTS),
    "--speculative-draft-tensor-parallel-size": Advice(NO_DRAFTS),
    "--ngram-prompt-lookup-max": Advice(NO_DRAFTS),
    "--ngram-prompt-lookup-min": Advice(NO_DRAFTS),
    "--disable-mm-preprocessor-cache": Advice(TEXT_ONLY),
    "--enable-multimodal-encoder-data-parallel": Advice(TEXT_ONLY, off=True),
    "--guided-decoding-disable-fallback": Advice("There is no other backend to fall back to: leave it out", on=True),
    "--guided-decoding-disable-any-whitespace": Advice(GRAMMARS),
    "--guided-decoding-disable-additional-properties": Advice(GRAMMARS),
    "--num-redundant-experts": Advice(NO_BALANCE, holds=("0",)),
    "--eplb-window-size": Advice(NO_BALANCE),
    "--eplb-step-interval": Advice(NO_BALANCE),
    "--eplb-log-balancedness": Advice(NO_BALANCE, off=True),
    "--tokenizer-pool-size": Advice("Use --routers: each renders and tokenizes in threads of its own", holds=("0",)),
    "--model-tag": Advice("Give the model as the first argument, or as --model"),
    "--calculate-kv-scales": Advice("Scales of an fp8 KV cache are the checkpoint's: leave it out", off=True),
}
ADVICE: Mapping[str, Advice] = (
    MODEL
    | LOAD
    | ATTENTION_AND_MAMBA
    | STRUCTURED
    | PARALLEL
    | CACHE
    | OFFLOAD
    | MULTIMODAL
    | LORA
    | LOGGING
    | OBSERVABILITY
    | SCHEDULER
    | COMPILATION
    | VLLM
    | FRONTEND
    | EARLIER
)
# Of an `LLM`, by name, and where it differs from a server.
OFFLINE: Mapping[str, Advice] = {
    **{flag[2:].replace("-", "_"): advice for flag, advice in ADVICE.items()},
    "distributed_executor_backend": Advice("Ranks are processes of this machine: leave it out", holds=("mp", "uni")),
    "data_parallel_size": Advice("`squadron batch` spreads prompts over --replicas", holds=("1",)),
}
USE_STRUCTURED = "Use structured_outputs of SamplingParams, such as {'regex': '[ab]+'}"
# Of its methods.
CALLS: Mapping[str, Advice] = {
    "lora_request": Advice(NO_ADAPTERS),
    "prompt_adapter_request": Advice(NO_ADAPTERS),
    "guided_options_request": Advice(USE_STRUCTURED),
    "priority": Advice("Prompts of a call run together, the first ones first: order them"),
    "tokenization_kwargs": Advice(
        "Give token ids, or cut prompts with truncate_prompt_tokens of SamplingParams", holds=("{}",)
    ),
    "mm_processor_kwargs": Advice(TEXT_ONLY, holds=("{}",)),
    "chat_template_content_format": FRONTEND["--chat-template-content-format"],
    "pooling_params": Advice("Use pooling='last' or 'mean'"),
}
CHOOSE = "Use n, and choose among the choices by their cumulative_logprob (logprobs=0)"
NO_BEAMS = "There is no beam search: leave it out"
# Of its `SamplingParams`, with those of earlier releases.
FIELDS: Mapping[str, Advice] = {
    "best_of": Advice(CHOOSE, holds=("1",)),
    "use_beam_search": Advice(CHOOSE, off=True),
    "length_penalty": Advice(NO_BEAMS, holds=("1", "1.0")),
    "early_stopping": Advice(NO_BEAMS, off=True),
    "guided_decoding": Advice(USE_STRUCTURED),
    "logits_processors": Advice("Use logit_bias, bad_words, allowed_token_ids or structured_outputs", holds=("[]",)),
    "spaces_between_special_tokens": Advice("Texts are as the tokenizer writes them", on=True),
    "flat_logprobs": Advice("logprobs are a list of one TokenLogprob a token: leave it out", off=True),
    "prompt_logprob_token_ids": Advice("Use prompt_logprobs"),
    "prompt_logprob_start": Advice("Use prompt_logprobs: it tells all of the prompt", holds=("0",)),
    "skip_reading_prefix_cache": Advice("Use enable_prefix_caching=False of LLM", off=True),
    "stream_interval": Advice("Results come when they are whole: leave it out", holds=("1",)),
    "skip_clone": Advice("Nothing is copied: leave it out", on=True, off=True),
    "thinking_token_budget": Advice("Use a server, whose requests have it, or max_tokens", holds=("-1",)),
    "repetition_detection": Advice("Use repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": Advice("Answers do not tell which experts ran: leave it out", holds=("0",)),
    "trace_decode_token_ids": Advice("Tokens cannot be given for a request to draw: leave it out"),
}
# Short spellings of those.
SHORT = {
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-O": "--optimization-level",
}
