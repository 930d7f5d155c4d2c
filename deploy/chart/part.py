"""What all descriptions of values are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
# As a pattern binds texts alone, numbers pass it too, which is how CPUs are mostly written.
Cpu = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$", json_schema_extra={"type": ["string", "number"]})]
OptionalName = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Percent = Annotated[int, Field(ge=0, le=100)]
Texts = dict[str, str]
Anything = dict[str, Any]  # a piece of a Kubernetes object, which Kubernetes itself checks


class Part(BaseModel):
    """A part of the values. Its fields' descriptions are the comments of values.yaml and the README's table."""

    model_config = ConfigDict(frozen=True, extra="forbid")
