"""Decoders of transformers over the paged cache: any that attends through `AttentionInterface`."""
