"""From a configuration to what a front end must know of its model."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.openai.reasoning.parsers import REASONING_PARSERS
from cluster.openai.served_model import ServedModel, matryoshka_of
from cluster.openai.tools.formats import TOOL_PARSERS
from engine.kv.room import fit_given_blocks
from engine.loader.checkpoint import TEXT_FILES, read_json
from engine.loader.model_folder import open_model
from engine.text.tokenizer import Tokenizer


def served_model(config: ClusterConfig) -> ServedModel:
    """Read a resolved configuration's tokenizer and config files, and fetch no weights; raises `SquadronError`."""
    folder = open_model(config.model, TEXT_FILES)
    spec = folder.spec
    tools, reasoning = config.tool_call_parser, config.reasoning_parser
    shrink = config.max_model_len is None
    engine = config.engine.resolved(max_model_len=config.max_model_len or spec.max_positions)
    return ServedModel(
        model_id=config.model_id,
        aliases=config.names[1:],
        tokenizer=Tokenizer(config.tokenizer or config.model),
        max_model_len=fit_given_blocks(engine, shrink).context_len,
        vocab_size=spec.vocab_size,
        tool_parser=None if tools is None else TOOL_PARSERS.get(tools),
        reasoning_parser=None if reasoning is None else REASONING_PARSERS.get(reasoning),
        pooling="mean" if config.embedding_pooling == "mean" else "last",
        matryoshka=matryoshka_of(read_json(folder.path / "config.json")),
        by_priority=engine.scheduling_policy == "priority",
        strict_fields=config.strict_fields,
    )
