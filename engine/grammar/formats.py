"""Formats of strings, each as a pattern of texts that are valid by its standard; not always all of them."""

from __future__ import annotations

_LONG = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"(19|20)[0-9]{{2}}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Each text can be read in one way only: where an end may be an end or not, each token is dear to check.
_LABEL = "[A-Za-z0-9]{1,30}(-[A-Za-z0-9]{1,15})?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,4}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,6}W|[0-9]{1,6}D(T[0-9]{1,6}H)?|T[0-9]{1,6}[HMS])",
    "email": rf"[A-Za-z0-9]{{1,30}}([_+\-][A-Za-z0-9]{{1,15}}){{0,2}}@({_LABEL}\.){{1,3}}[A-Za-z]{{2,24}}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"[a-z][a-z0-9+.\-]{{0,20}}://{_HOST}(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~\-]{{0,90}}){{0,20}}",
}
# Characters of the shortest and the longest text that is written. Of a URI, pydantic allows 2,083.
LENGTHS = {
    "date": (10, 10),
    "time": (9, 21),
    "date-time": (20, 32),
    "duration": (3, 16),
    "email": (6, 228),
    "hostname": (1, 234),
    "ipv4": (7, 15),
    "ipv6": (15, 39),
    "uuid": (36, 36),
    "uri": (5, 2083),
}


def format_pattern(name: str) -> str:
    """Return the pattern of format `name`, one of `schema_check.FORMATS`."""
    return f"^{_PATTERNS[name]}$"
