"""Arguments by name as vLLM's users write them: ours as they are, and what to write in the place of others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import FrozenInstanceError
from functools import wraps
from typing import Any, TypeVar

from engine.errors import InvalidRequestError, SquadronError
from engine.near_name import near_name
from engine.vllm_advice import FIELDS, Advice

Class = TypeVar("Class", bound=type[Any])
Refusal = Callable[[str, str], SquadronError]  # of a sentence and a name


def own_arguments(
    given: Mapping[str, Any],
    known: Collection[str],
    advice: Mapping[str, Advice],
    kind: str,
    refusal: Refusal = InvalidRequestError,
) -> Mapping[str, Any]:
    """Return those that are `known`, without those of vLLM that are left open or ask for what is so here anyway.

    Raises `refusal` for another one, with what to do instead or the nearest that there is. kind: what they are.
    """
    others = [name for name in given if name not in known]
    for name in others:
        if name not in advice:
            near = near_name(name, known)
            hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
            raise refusal(f"unknown {kind} {name}; {hint}", name)
        if given[name] is not None and not advice[name].allows(given[name]):
            raise refusal(f"there is no {kind} {name}: {advice[name].text}", name)
    return {name: given[name] for name in given if name not in others} if others else given


def answers_vllms(frozen: Class) -> Class:
    """Have a frozen dataclass of a request say what to write for a field that it lacks, and for one that is set."""
    known, make = frozen.__dataclass_fields__, frozen.__init__

    @wraps(make)
    def init(self: Any, *values: Any, **given: Any) -> None:
        make(self, *values, **own_arguments(given, known, FIELDS, "field"))

    def refuse(self: Any, name: str, value: Any) -> None:
        raise FrozenInstanceError(
            f"{frozen.__name__} cannot be changed, since requests share them: write params = "
            f"params.clone({name}={value!r})"
        )

    frozen.__init__ = init
    frozen.__setattr__ = refuse  # type: ignore[assignment]  # it never returns
    return frozen
