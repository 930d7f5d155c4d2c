"""The object that scripts ask for where the library takes a pydantic model."""

from typing import Literal

from checks import City
from pydantic import BaseModel, Field


class Report(BaseModel):
    """The weather in a city. Everything in it is bounded: a small model may never come to an end by itself."""

    city: City
    degrees: int
    words: list[Literal["warm", "cold"]] | None = Field(None, max_length=2)
