"""The file of `--api-key-file`, YAML or JSON: parsed with complaints that name the line, read anew when it changes.

No restart is needed, and there is no moment in which keys are missing.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import yaml

from cluster.accounts.costs import OTHERS
from cluster.admission.keys import (
    FixedKeys,
    KeyEntry,
    KeyRing,
    KeySource,
    Quota,
    Tenant,
    admin_entry,
    hash_key,
    scrape_entry,
)
from engine.errors import ConfigError

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_COUNT = re.compile(r"[1-9][0-9]{0,14}")
_QUOTAS = tuple(f.name for f in fields(Quota))
_FIELDS = ("key", "key_sha256", "tenant", "expires", "admin", "scrape", *_QUOTAS)
_NULL = "tag:yaml.org,2002:null"
T = TypeVar("T")
POLL_SECONDS = 1.0
logger = logging.getLogger(__name__)
Stamp = tuple[int, int, int]


@dataclass(slots=True)
class _Item:
    """One entry as it was written: field -> node, those that are null left out."""

    line: int
    nodes: dict[str, yaml.ScalarNode] = field(default_factory=dict)


def parse_keys(text: str, source: str) -> list[KeyEntry]:
    """Return the keys that `text` lists; `source` is the file's name, for messages.

    Each item has `key` or `key_sha256` (64 hex digits), `tenant`, and may have `expires` (ISO date-time, in UTC
    unless it says otherwise), `admin` or `scrape` (see `Tenant`), `requests_per_minute`, `tokens_per_minute`,
    `max_concurrent` and `max_stored_bytes`. Quotas are the tenant's: several keys of one tenant share them, and
    state the same or leave them out. The others are the key's.
    Raises `ConfigError` that names file and line.
    """
    try:
        items = [_item(node) for node in _nodes(text)]
        digests = [_digest(item) for item in items]
        tenants = _tenants(items)
        _refuse_twice(items, digests)
        return [
            KeyEntry(digest, _holder(item, tenants), _read(item, "expires", _when))
            for item, digest in zip(items, digests, strict=True)
        ]
    except _WrongLineError as error:
        raise ConfigError(f"{source}, line {error.line}: {error}", "api_key_file") from None


class _WrongLineError(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def _nodes(text: str) -> list[yaml.Node]:
    with suppress(ValueError):  # then it is YAML
        json.loads(text)
        text = text.replace("\t", " ")  # YAML refuses tabs between JSON's tokens; its strings cannot hold one
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _WrongLineError(mark.line + 1 if mark else 1, f"no valid YAML or JSON: {error.problem}") from None
    except yaml.YAMLError as error:
        raise _WrongLineError(1, f"no valid YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        line = root.start_mark.line + 1 if root is not None else 1
        raise _WrongLineError(line, "must be a list of keys, one `- {key: ..., tenant: ...}` at least")
    return root.value


def _item(node: yaml.Node) -> _Item:
    item = _Item(node.start_mark.line + 1)
    if not isinstance(node, yaml.MappingNode):
        raise _WrongLineError(item.line, "must be a key such as `{key: ..., tenant: ...}`")
    for name_node, value in node.value:
        name, line = str(name_node.value), name_node.start_mark.line + 1
        if name not in _FIELDS:
            near = difflib.get_close_matches(name[:100], _FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(_FIELDS)
            raise _WrongLineError(
                line, f"unknown field; {hint}"
            )  # not quoted: it may be a key, put in the wrong place
        if name in item.nodes:
            raise _WrongLineError(line, f"{name} stands there twice")
        if not isinstance(value, yaml.ScalarNode):
            raise _WrongLineError(line, f"{name} must be one value")
        if value.tag != _NULL:
            item.nodes[name] = value
    return item


def _digest(item: _Item) -> bytes:
    if ("key" in item.nodes) == ("key_sha256" in item.nodes):
        raise _WrongLineError(item.line, "needs either key or key_sha256")
    plain, hashed = _read(item, "key", _plain_key), _read(item, "key_sha256", _hex)
    return hash_key(plain) if plain is not None else hashed or b""


def _tenants(items: list[_Item]) -> dict[str, Tenant]:
    """Gather each tenant's quotas from all its keys."""
    tenants: dict[str, Tenant] = {}
    for item in items:
        name = _text(item, "tenant")
        known = tenants.get(name, Tenant(name))
        for quota in _QUOTAS:
            stated, before = _read(item, quota, _count), getattr(known.quota, quota)
            if stated is not None and before is not None and stated != before:
                line = item.nodes[quota].start_mark.line + 1
                raise _WrongLineError(line, f"{quota} of tenant {name} is {before} above: keys of a tenant share it")
            if stated is not None:
                known = replace(known, quota=replace(known.quota, **{quota: stated}))
        tenants[name] = known
    return tenants


def _holder(item: _Item, tenants: dict[str, Tenant]) -> Tenant:
    tenant = tenants[_text(item, "tenant")]
    admin, scrape = _read(item, "admin", _yes), _read(item, "scrape", _yes)
    if admin and scrape:
        line = item.nodes["scrape"].start_mark.line + 1
        raise _WrongLineError(
            line, "scrape: true excludes admin: true; an admin's key may scrape as well, leave it out"
        )
    return replace(tenant, sees_all=bool(admin), scrapes=bool(scrape)) if admin or scrape else tenant


def _refuse_twice(items: list[_Item], digests: list[bytes]) -> None:
    first: dict[bytes, int] = {}
    for item, digest in zip(items, digests, strict=True):
        if first.setdefault(digest, item.line) != item.line:
            raise _WrongLineError(item.line, f"the same key stands in line {first[digest]}")


def _text(item: _Item, name: str) -> str:
    if name not in item.nodes:
        raise _WrongLineError(item.line, f"{name} is missing")
    return _read(item, name, _tenant_name) or ""


def _read(item: _Item, name: str, read: Callable[[str], T]) -> T | None:
    """Return a field's value, None where it is not given. Values are never quoted in messages: they may be keys."""
    node = item.nodes.get(name)
    if node is None:
        return None
    try:
        return read(str(node.value))
    except ValueError as error:
        raise _WrongLineError(node.start_mark.line + 1, f"{name} must be {error}") from None


def _plain_key(value: str) -> str:
    if not _KEY.fullmatch(value):
        raise ValueError("1 to 512 printable ASCII characters without spaces")
    return value


def _hex(value: str) -> bytes:
    if not _SHA256.fullmatch(value):
        raise ValueError("the 64 hex digits of the key's SHA-256")
    return bytes.fromhex(value)


def _tenant_name(value: str) -> str:
    if not _TENANT.fullmatch(value):
        raise ValueError("1 to 64 letters, digits, dots, dashes and underscores, such as team-a")
    if value == OTHERS:
        raise ValueError(f"another name than {OTHERS}, under which a replica counts all tenants beyond its accounts")
    return value


def _count(value: str) -> int:
    if not _COUNT.fullmatch(value):
        raise ValueError("a whole number of at least 1, such as 600")
    return int(value)


def _yes(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("true or false")
    return value == "true"


def _when(value: str) -> float:
    wrong = "an ISO date-time such as 2027-01-31T12:00:00Z"
    if len(value) <= len("2027-01-31"):
        raise ValueError(wrong)  # a day alone leaves open which of its ends is meant
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(wrong) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


class KeyFile:
    """The keys of one file. `ring` is replaced as a whole; a file that cannot be read or is wrong leaves it as it is.

    A changed file is read only when it looked the same on two polls and while it was read: a half-written list must
    not shut out the keys that are still to be written. So a change counts after one to two polls.
    more: keys that are valid beside those of the file; of the same key, the file's entry holds.
    Raises `ConfigError` that names file and line when the first reading fails.
    """

    def __init__(self, path: Path, more: Sequence[KeyEntry] = (), poll_seconds: float = POLL_SECONDS) -> None:
        self._path = path
        self._more = more
        self._poll_seconds = poll_seconds
        try:
            stamp = self._stamp()
            self.ring = self._read()
        except OSError as error:
            raise ConfigError(
                f"api_key_file: {path} cannot be read: {error.strerror or error}; `squadron keys new` makes entries",
                "api_key_file",
            ) from error
        self._taken: Stamp | None = stamp  # what `ring` or the last complaint was made from; None = there was no file
        self._seen: Stamp | None = stamp  # what the last poll saw

    async def watch(self) -> None:
        """Poll the file until cancelled. Reading is left to a thread: the disk may be slow."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                await asyncio.to_thread(self.poll)
            except Exception:
                # Whatever is wrong with the file, the keys that are known go on being valid.
                logger.exception("the API keys in %s could not be read; those read before stay valid", self._path)

    def poll(self) -> bool:
        """Look at the file once; return whether `ring` was replaced. A wrong file is logged once for each change."""
        try:
            stamp = self._stamp()
            settled, self._seen = stamp == self._seen, stamp
            if not settled or stamp == self._taken:
                return False
            ring = self._read()
            if self._stamp() != stamp:
                return False
        except OSError as error:
            self._keep_old(None, f"{self._path}: {error.strerror or error}")
            return False
        except ConfigError as error:
            self._keep_old(stamp, str(error))
            return False
        self._taken, self.ring = stamp, ring
        logger.info("%s was read again: %d API keys of %d tenants", self._path, len(ring), len(ring.tenants))
        return True

    def _keep_old(self, stamp: Stamp | None, problem: str) -> None:
        if stamp != self._taken:
            logger.error("%s; the %d API keys read before stay valid", problem, len(self.ring))
        self._taken = self._seen = stamp

    def _read(self) -> KeyRing:
        try:
            text = self._path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path}: not UTF-8: {error.reason}", "api_key_file") from error
        entries = parse_keys(text, str(self._path))
        return KeyRing([*self._more, *entries])

    def _stamp(self) -> Stamp:
        state = self._path.stat()
        return (state.st_mtime_ns, state.st_size, state.st_ino)


def keys_for(api_key: str | None, api_key_file: str | None, metrics_key: str | None = None) -> KeySource | None:
    """Return the keys of `--api-key`, `--api-key-file` and `--metrics-key`, None without the first two: open to all.

    Raises `ConfigError` that names file and line.
    """
    own = [] if api_key is None else [admin_entry(api_key)]
    if metrics_key is not None:
        own.append(scrape_entry(metrics_key))
    if api_key_file is not None:
        return KeyFile(Path(api_key_file), own)
    return None if api_key is None else FixedKeys(KeyRing(own))
