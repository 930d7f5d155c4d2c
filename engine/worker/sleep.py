"""Sleep: a loaded model gives its memory back, keeps its place, and is awake again far sooner than it could start."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import ConfigError
from engine.worker.executor import Executor

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)  # what can be woken alone, in this order
LEVELS = (1, 2)


class Sleep:
    """Which parts of an engine sleep, and at which level.

    level: 0 while nothing does.
    """

    def __init__(self, executor: Executor) -> None:
        self.level = 0
        self._executor = executor
        self._asleep: set[str] = set()

    @property
    def asleep(self) -> tuple[str, ...]:
        """Which of `TAGS` sleep."""
        return tuple(tag for tag in TAGS if tag in self._asleep)

    def begins(self, level: int) -> bool:
        """Return whether there is anything to be put to sleep.

        Raises `ConfigError` for an unknown level, and where the engine would have to wake up before.
        """
        if level not in LEVELS:
            raise ConfigError(f"level must be 1 or 2, not {level!r}", "level")
        if self.level and (level > self.level or len(self._asleep) < len(TAGS)):
            raise ConfigError(f"the engine sleeps already, at level {self.level}; call wake_up() first", "level")
        return not self.level

    def begin(self, level: int) -> None:
        """Put everything to sleep, no step being on its way. Raises what `Executor.sleep` does."""
        self._executor.sleep(level)
        self.level = level
        self._asleep.update(TAGS)

    def end(self, tags: Iterable[str] | None) -> None:
        """Wake these parts up, None = all; parts that are awake stay so.

        Raises `ConfigError` for an unknown tag before anything is woken, and what `Executor.wake` does, with the part
        that failed still asleep.
        """
        if isinstance(tags, str):
            raise ConfigError(f"tags must be a list such as {[tags]}, not {tags!r}", "tags")
        wanted = TAGS if tags is None else tuple(tags)
        unknown = [tag for tag in wanted if tag not in TAGS]
        if unknown:
            raise ConfigError(f"tags must be among {', '.join(TAGS)}, not {', '.join(map(repr, unknown))}", "tags")
        for tag in TAGS:
            if tag in wanted and tag in self._asleep:
                self._executor.wake(tag)
                self._asleep.remove(tag)
        if not self._asleep:
            self.level = 0
