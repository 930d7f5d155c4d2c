"""The items that a response was made from, as `GET /v1/responses/{response_id}/input_items` lists them.

Source: OpenAI API reference, "list input items".
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from cluster.openai.response_fields import ItemsQuery
from engine.errors import InvalidRequestError

FEW, MOST = 20, 100  # items of a page: where the client does not say how many, and at most
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def items_page(given: Any, response_id: str, query: ItemsQuery) -> dict[str, Any]:
    """Return a page of the items. given: the `input` of an accepted request, a text or items.

    Raises `InvalidRequestError` where `limit` is out of bounds, or no item has the id that `after` names.
    """
    if query.limit is not None and not 1 <= query.limit <= MOST:
        raise InvalidRequestError(f"limit must lie between 1 and {MOST}", "limit")
    items = _items(given, response_id)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise InvalidRequestError("after must be the id of an item of this response's input", "after")
        items = items[ids.index(query.after) + 1 :]
    data = items[: query.limit or FEW]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(data) < len(items)}


def _items(given: Any, response_id: str) -> list[dict[str, Any]]:
    """Return all items, each with an id that no other has, the same at every call."""
    items: list[dict[str, Any]] = []
    seen = set[str]()
    for i, item in enumerate(given if isinstance(given, list) else [{"role": "user", "content": given}]):
        kind, name = item.get("type") or "message", item.get("id")
        if not isinstance(name, str) or not name or name in seen:
            name = f"{_PREFIXES[kind]}_{blake2b(f'{response_id}/input/{i}'.encode(), digest_size=16).hexdigest()}"
        seen.add(name)
        items.append({"id": name, "type": kind, "status": item.get("status") or "completed", **_content(kind, item)})
    return items


def _content(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "message":
        return {"role": item["role"], "content": _parts(item.get("content"), item["role"] == "assistant")}
    if kind == "function_call":
        return {name: item[name] for name in ("call_id", "name", "arguments")}
    if kind == "function_call_output":
        output = item["output"]
        return {"call_id": item["call_id"], "output": output if isinstance(output, str) else _parts(output, False)}
    return {"summary": item.get("summary") or [], "content": item.get("content") or []}


def _parts(content: Any, said: bool) -> list[dict[str, Any]]:
    """Return the parts of a text. said: by the model."""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    if said:
        return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]
