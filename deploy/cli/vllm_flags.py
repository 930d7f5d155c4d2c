"""A command line, or a file of settings, as vLLM's users write it, in our spelling; advice for what is not ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from engine.errors import ConfigError
from engine.vllm_advice import ADVICE, SHORT, Advice

# Other spellings of our flags, by setting. Those in full are vLLM's for the same thing.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("-tp", "--tp"),
    "enable_expert_parallel": ("-ep",),
    "quantization": ("-q",),
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "num_kv_blocks": ("--num-gpu-blocks-override",),
    "routers": ("--api-server-count", "-asc"),
}
SIZES = "--cudagraph-capture-sizes"
NAMES = "--served-model-name"
KEY = "--api-key"


def our_spelling(arguments: Sequence[str], own: Collection[str]) -> list[str]:
    """Return the command line without what holds here anyway, with dashes in flags, and sizes separated by commas.

    A flag's opposite, as vLLM spells it from 0.33 on, is `--no-...` here: `--disable-prefix-caching`.

    own: the spellings of the command's own flags.
    """
    dashed = [_opposite(_dashed(one), own) for one in _before_rest(arguments)]
    rest = arguments[len(dashed) :]
    return [*join_sizes(_without_what_holds(dashed, own)), *rest]


def join_sizes(arguments: Sequence[str]) -> list[str]:
    """Return a command line on which sizes that follow each other, as vLLM takes them, are separated by commas.

    `--cudagraph-capture-sizes 1 8 64` becomes `--cudagraph-capture-sizes 1,8,64`.
    """
    joined: list[str] = []
    for one in arguments:
        if one.isdecimal() and len(joined) > 1 and joined[-2] == SIZES and joined[-1].replace(",", "").isdecimal():
            joined[-1] += f",{one}"
        else:
            joined.append(one)
    return joined


def join_names(arguments: Sequence[str]) -> list[str]:
    """Return a command line on which names are separated by commas: all that follow the flag, up to the next one.

    `--served-model-name a b` becomes `--served-model-name a,b`.
    """
    joined: list[str] = []
    for one in arguments:
        if not one.startswith("-") and len(joined) > 1 and joined[-2] == NAMES and not joined[-1].startswith("-"):
            joined[-1] += f",{one}"
        else:
            joined.append(one)
    return joined


def without_last_name(arguments: Sequence[str]) -> list[str]:
    """Return a command line of `join_names` on which the last of several names is an argument of its own."""
    parted: list[str] = []
    for one in arguments:
        names, comma, last = one.rpartition(",")
        parted += [names, last] if comma and parted and parted[-1] == NAMES else [one]
    return parted


def without_more_keys(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line with what follows `--api-key` and its one value left out, and what that is."""
    if KEY not in arguments:
        return list(arguments), []
    first = arguments.index(KEY) + 2
    more = list(takewhile(lambda one: not one.startswith("-"), arguments[first:]))
    return [*arguments[:first], *arguments[first + len(more) :]], more


def advice_on(option: str, arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return an unknown flag as it was written, and what to do instead; None for one that is not vLLM's.

    option: as the parser names it: of `-pp` no more than `-p`.
    """
    written = option
    if not option.startswith("--"):
        found = (one for one in arguments if one.startswith(option) and not one.startswith("--"))
        written = next(found, option).partition("=")[0]
    name = written.partition(".")[0]  # vLLM takes parts of JSON as --compilation-config.mode
    name = "-O" if name.startswith("-O") else name
    advice = _advice(name)[0] or _advice(name.rstrip("0123456789"))[0]  # `-dp2`, too
    return None if advice is None else (written, advice.text)


def parted(option: str, arguments: Sequence[str], own: Collection[str]) -> str | None:
    """Return how to write a short flag that its value is glued to: `-tp 2` for `-tp2`; None for another."""
    glued = next((one for one in arguments if one.startswith(option) and not one.startswith("--")), "")
    name = glued.rstrip("0123456789")
    return f"{name} {glued[len(name) :]}" if glued != name and name in own else None


def without_vllms(settings: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return settings of a file, by name, in our spelling and without those of vLLM that hold here anyway.

    settings: their names may have dashes or underscores. own: names of our settings.
    Raises `ConfigError` for one that is given in two spellings, and with what to do for others of vLLM's that are
    none of ours.
    """
    ours = {name[2:].replace("-", "_"): one for one, names in ALIASES.items() for name in names if name[:2] == "--"}
    flags = {"--" + name.replace("_", "-") for name in own}
    names = {name.replace("-", "_") for name in settings}
    kept: dict[str, Any] = {}
    for written, given in settings.items():
        flag = "--" + written.replace("_", "-")
        positive = _opposite(flag, flags | ADVICE.keys()).replace("--no-", "--", 1)
        value = not given if positive != flag and isinstance(given, bool) else given
        key = positive[2:].replace("-", "_")
        if ours.get(key, key) in kept:
            raise ConfigError(f"{ours.get(key, key)} is given twice; keep one of them", key)
        advice = ADVICE.get(positive)
        if advice is None:
            kept[ours.get(key, key)] = value
        elif not advice.allows(value) or (advice.needs and advice.needs[2:].replace("-", "_") not in names):
            raise ConfigError(f"there is no setting {written.replace('-', '_')}: {advice.text}", key)
    return kept


def _before_rest(arguments: Sequence[str]) -> Iterator[str]:
    for one in arguments:
        if one == "--":
            return
        yield one


def _dashed(argument: str) -> str:
    """vLLM takes `--max_model_len`, too."""
    if not argument.startswith("--"):
        return argument
    written, equals, value = argument.partition("=")
    name, dot, part = written.partition(".")  # of a JSON object, whose names keep their underscores
    return name.replace("_", "-") + dot + part + equals + value


def _opposite(argument: str, known: Collection[str]) -> str:
    """Return the `--no-...` of a known flag for its opposite: `--disable-x` of `--enable-x`, or the reverse."""
    for prefix, inverse in (("--disable-", "--enable-"), ("--enable-", "--disable-")):
        positive = inverse + argument.removeprefix(prefix)
        if argument.startswith(prefix) and argument not in known and positive in known:
            return "--no-" + positive.removeprefix("--")
    return argument


def _advice(name: str) -> tuple[Advice | None, bool]:
    """Return the advice for a flag, and whether it is written as its opposite."""
    full = _opposite(SHORT.get(name, name), ADVICE)
    positive = "--" + full.removeprefix("--no-") if full.startswith("--no-") else ""
    return (ADVICE[positive], True) if positive in ADVICE else (ADVICE.get(full), False)


def _without_what_holds(arguments: Sequence[str], own: Collection[str]) -> list[str]:
    kept: list[str] = []
    left = list(arguments)
    while left:
        one = left.pop(0)
        name, equals, value = one.partition("=")
        advice, negative = _advice(name)
        if advice is None or name in own:
            kept.append(one)
        elif advice.holds and not negative:
            said = value if equals else left[0] if left else ""
            if said not in advice.holds:
                kept.append(one)
            elif not equals:
                left.pop(0)
        elif equals or not (advice.off if negative else advice.on) or not _has(arguments, advice.needs):
            kept.append(one)
    return kept


def _has(arguments: Sequence[str], needed: str | None) -> bool:
    """Whether a flag is there, or a file that may have it."""
    return needed is None or any(one.partition("=")[0] in (needed, "--config") for one in arguments)
