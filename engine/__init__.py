"""One model on one group of workers: scheduler, KV blocks, inputs, models, attention, sampling.

Runs on a bare machine with torch, transformers, safetensors, tokenizers and numpy; never imports Ray.
"""
