"""Flags of `vllm serve` (https://docs.vllm.ai/en/latest/cli/serve) as its users know them."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = "--cudagraph-capture-sizes"
# What to do here for those that are none of ours.

INSTEAD = {
    "--allow-credentials": "Browsers send pages' keys in the header Authorization, never cookies: --allowed-origins",
    "--allowed-headers": "Pages of --allowed-origins may send any header",
    "--allowed-methods": "Pages of --allowed-origins may use any method",
    "--chat-template": "The model's own template is used: put yours into its folder as chat_template.jinja",
    "--cpu-offload-gb": "Weights stay on GPUs: --quantization makes them smaller, --tensor-parallel-size splits them",
    "--data-parallel-size": "Use --replicas",
    "--disable-log-requests": "Nothing is logged of requests without --enable-log-requests",
    "--distributed-executor-backend": "Ranks are always actors of Ray",
    "--download-dir": "Set HF_HOME, or give the model's folder",
    "--enable-auto-tool-choice": "--tool-call-parser is all it needs",
    "--enable-chunked-prefill": "It is always on: --max-num-batched-tokens is the size of a step",
    "--enable-expert-parallel": "Mixtures of experts are not supported",
    "--enable-lora": "Adapters are not served: merge them into the weights",
    "--enable-sleep-mode": "`LLM.sleep` needs no flag; of a server, --min-replicas 0 ends idle replicas",
    "--guided-decoding-backend": "It is always xgrammar",
    "--load-format": "Weights are read from safetensors files",
    "--max-logprobs": "A request may ask for up to 20",
    "--max-seq-len-to-capture": "Graphs serve every length: --cudagraph-capture-sizes chooses their batch sizes",
    "--num-gpu-blocks-override": "Use --num-kv-blocks",
    "--pipeline-parallel-size": "Layers are not spread over stages: use --tensor-parallel-size, across hosts too",
    "--revision": "Give the folder of a download: `hf download MODEL --revision ...` prints it",
    "--speculative-config": "There is no speculative decoding",
    "--ssl-certfile": "TLS is for what stands in front: an ingress or a reverse proxy",
    "--ssl-keyfile": "TLS is for what stands in front: an ingress or a reverse proxy",
    "--swap-space": "Nothing is swapped: what is preempted is computed anew",
    "--trust-remote-code": "A checkpoint's code is never run: the README names the models that are supported",
}


def join_sizes(arguments: Sequence[str]) -> list[str]:
    """Return a command line on which sizes that follow each other, as vLLM takes them, are apart by commas.

    `--cudagraph-capture-sizes 1 8 64` becomes `--cudagraph-capture-sizes 1,8,64`.
    """
    joined: list[str] = []
    for one in arguments:
        if one.isdecimal() and len(joined) > 1 and joined[-2] == SIZES and joined[-1].replace(",", "").isdecimal():
            joined[-1] += f",{one}"
        else:
            joined.append(one)
    return joined
