"""One decoder, described by a small frozen spec per architecture."""
