"""Errors without their words: a message may quote what a client sent, and logs hold none of that."""

from __future__ import annotations

import os


def wordless(error: BaseException) -> BaseException:
    """Return what a log may show of an error that came from work on a client's texts (`exc_info=`).

    It prints as `error` does, with the kinds and the lines of code of all that led to it, and without any message:
    those of `ValueError`, `KeyError` and of most libraries quote what they were given. Of an `OSError` the number is
    kept, in the system's words.
    """
    return _bare(error, {})


def _bare(error: BaseException, known: dict[int, BaseException]) -> BaseException:
    if id(error) in known:  # contexts may go round in a circle
        return known[id(error)]
    bare = known[id(error)] = _of_its_kind(error, known)
    bare.__traceback__ = error.__traceback__
    if error.__context__ is not None:
        bare.__context__ = _bare(error.__context__, known)
    if error.__cause__ is not None:
        bare.__cause__ = _bare(error.__cause__, known)
    bare.__suppress_context__ = error.__suppress_context__
    return bare


def _of_its_kind(error: BaseException, known: dict[int, BaseException]) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        return BaseExceptionGroup("several", [_bare(one, known) for one in error.exceptions])
    words: tuple[str, ...] = ()
    if isinstance(error, OSError) and error.errno is not None:
        words = (f"[Errno {error.errno}] {os.strerror(error.errno)}",)
    kind = type(error)
    same_name = type(kind.__name__, (Exception,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    bare: BaseException = same_name(*words)
    return bare
