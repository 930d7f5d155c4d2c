"""Whether a model is there, readable, fits this machine, and is multiplied here as its weights are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deploy.cli.flags import in_flags
from deploy.cli.terminal import gib
from deploy.doctor.checks import Finding, ProbeError, ask, fix, ok, warning
from engine.quantization.spec import FOUR_BITS

PROBE_SECONDS = 65.0  # importing torch from a cold disk takes most of it; the hub may be asked for the config
SLOW = "made plain for each product, which is slow"


def check_model(model: str) -> list[Finding]:
    """Check a model by what a process of its own finds."""
    return model_findings(model, lambda: ask("model", model, seconds=PROBE_SECONDS))


def model_findings(model: str, probe: Callable[[], Mapping[str, Any]]) -> list[Finding]:
    """Return findings on a model: its files, its memory, its weights. probe: as of `probes/model.py`."""
    try:
        report = probe()
    except ProbeError as error:
        return [warning("model", f"{model}: {error}", f"see what `squadron serve {model} --dry-run` says")]
    if "error" in report:
        return [fix("model", in_flags(str(report["error"])), "give a folder with config.json, a hub id, or 'demo'")]
    return [_files(model, report), _memory(report), _weights(report)]


def _files(model: str, report: Mapping[str, Any]) -> Finding:
    kind = report["architecture"]
    if report["folder"] is None:
        return warning(
            "model",
            f"{kind}; its weights are not in this machine's cache: the first start fetches them",
            f"hf download {model}",
        )
    if "damage" in report:
        return fix("model", f"{kind}; {report['damage']}", "fetch or copy the checkpoint again")
    files = f"{report['files']} weight file{'' if report['files'] == 1 else 's'}"
    return ok("model", f"{kind}; {files} of {gib(report['size'])}, readable, in {report['folder']}")


def _memory(report: Mapping[str, Any]) -> Finding:
    name = "model memory"
    if report["device"] == "cpu":
        needed, free = gib(report["needed"]), gib(report["free"])
        if report["needed"] > report["free"]:
            remedy = "end what else runs, use a larger machine, or --quantization int8 or int4"
            return fix(name, f"{needed} are needed at least, {free} are free", remedy)
        return ok(name, f"{needed} are needed at least, {free} are free")
    here = f"{report['gpus']} x {report['gpu']}"
    if report["ranks"] is None:
        why = in_flags(str(report.get("refusal", "it cannot be split over as many GPUs as there are")))
        return fix(name, f"{here} do not hold it: {why}", "`squadron plan` with --gpu says what does")
    text = f"fits {report['ranks']} of {here}, with a context of {report['context']:,} tokens"
    if report["context"] < report["positions"]:
        return warning(
            name,
            f"{text} of the model's {report['positions']:,}",
            "set --max-model-len to what you need; --kv-cache-dtype fp8, --quantization or more ranks leave more",
        )
    return ok(name, text)


def _weights(report: Mapping[str, Any]) -> Finding:
    """Say whether this machine multiplies the weights as they are held, or what it would."""
    products, weights = report["products"], report["weights"]
    native, on_gpu, blocks = _native(products), bool(products["gpu"]), bool(report["blocks"])
    if weights is None:
        offered = [each for each in ("fp8", "int8", "int4") if each in native and (on_gpu or each != "fp8")]
        return ok(
            "model weights", f"plain; {' and '.join(offered)} of --quantization are multiplied as they are here"
        )
    form = f"{weights}, by {report['method']}"
    if weights not in native or (blocks and not on_gpu and products["compiled"] is None):
        first = f"{native[0]} with a scale per output" if blocks else native[0]
        return warning(
            "model weights", f"{form}: here {SLOW}", f"use a checkpoint in {first} or {native[1]}, or a plain one"
        )
    some = " in steps of few rows and of experts" if on_gpu and (blocks or weights in FOUR_BITS) else ""
    return ok("model weights", f"{form}: multiplied as they are here{some}")


def _native(products: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is multiplied as it is held: on a GPU by its units or Triton, on a CPU by what is compiled for it.

    products: as `probes/weights.py` says.
    """
    if products["gpu"]:
        return ("fp8", "int8", *FOUR_BITS) if products["fp8"] else ("int8", *FOUR_BITS)
    return ("int8", "int4") if products["compiled"] is None else ("int8", *FOUR_BITS, "fp8")
