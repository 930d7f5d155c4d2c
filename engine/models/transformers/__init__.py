"""Decoders of transformers over the paged cache: any whose attention is recognised."""
