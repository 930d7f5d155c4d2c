"""The keywords of JSON schemas: which are enforced, which are refused, which say nothing of the values.

One that JSON Schema does not know says nothing (Core 2020-12, 6.5): it is taken, and passed over.
"""

from __future__ import annotations

from typing import Any, Final

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Formats of JSON Schema that are not written; a name that it does not know says nothing (Validation 2020-12, 7.2.3).
OTHER_FORMATS = (
    "idn-email",
    "idn-hostname",
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
)

# keyword -> what holds it back, "" where nothing does.
ENFORCED: Final = {
    "type": "",
    "enum": "beside it only `type`",
    "const": "beside it only `type`",
    "anyOf": "beside it only `type`",
    "oneOf": "as anyOf; options of different types, or objects with different constants of one "
    "property, which is then always written",
    "allOf": "of one schema, beside it only `type`; of objects that do not say different things of one property, nor "
    "bind others, beside it `properties` and `required` too",
    "not": "of `{}` only: nothing matches",
    "$ref": "within the schema (`#` or `#/...`), beside it only the `type` that it has",
    "$defs": "",
    "definitions": "",
    "properties": "written in the order in which they are listed",
    "required": "",
    "additionalProperties": "without it, an object with `properties` has no others",
    "unevaluatedProperties": "as additionalProperties",
    "patternProperties": "one pattern, for a map (no `properties`): all names match it",
    "minProperties": "up to the number of required properties; 1 for a map",
    "maxProperties": "for a map, or not below the number of properties",
    "propertyNames": "enum, const; for a map (no `properties`) pattern, format, minLength, maxLength too",
    "items": "a list of schemas is read as prefixItems",
    "prefixItems": "without `items`, nothing follows them unless minItems wants it",
    "additionalItems": "beside a list of `items`: what follows them",
    "unevaluatedItems": "as items",
    "minItems": "",
    "maxItems": "",
    "minLength": "counted in characters, none of which is written as an escape; beside `pattern` where that is one "
    "class, as `^[a-z]+$`; beside `format` where all that is written has such a length",
    "maxLength": "as minLength",
    "pattern": "what Python and ECMAScript share, without look-around, back-references, word boundaries and flags",
    "format": f"{', '.join(FORMATS)}; beside `pattern`, that is written; unknown names are annotations",
    "minimum": "at most 15 digits are written, with no exponent",
    "maximum": "as minimum",
    "exclusiveMinimum": "as minimum; a number",
    "exclusiveMaximum": "as maximum; a number",
    "multipleOf": "whole numbers up to 100",
}
ANNOTATIONS: Final = (
    "title",
    "description",
    "default",
    "examples",
    "example",
    "$schema",
    "$id",
    "$comment",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "nullable",
    "discriminator",
    "$anchor",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$vocabulary",
)
REFUSED: Final = (
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)


def constraints(schema: dict[str, Any]) -> set[str]:
    """Return the keywords of `schema` that constrain what may be written."""
    places = {"$defs", "definitions"}
    return {name for name, value in schema.items() if name not in places and not says_nothing(name, value)}


def says_nothing(name: str, value: Any) -> bool:
    """Whether this keyword with this value lets everything pass."""
    if name == "format":
        return isinstance(value, str) and value not in FORMATS + OTHER_FORMATS
    if name in ("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        return value == {}
    return (name not in ENFORCED and name not in REFUSED) or (name in ("uniqueItems", "not") and value is False)
