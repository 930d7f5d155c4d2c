"""The deployment that runs the server's batches: beside the routers, so that none of their work waits for a batch."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.admission.key_file import keys_for
from cluster.admission.keys import OPEN, KeySource, Tenant
from cluster.admission.quotas import Quotas
from cluster.batch.io.paths import is_url, local_path
from cluster.batch.ledger.epoch import make_private
from cluster.batch.ledger.records import answer_settings
from cluster.batch.run.backlog import BackgroundBounds, Backlog, full_bounds
from cluster.batch.run.driver import patient_config
from cluster.batch.server.batch_runner import Runner, Sweeper, TenantTurns
from cluster.batch.server.limits import CompletionWindows, RowQuotas
from cluster.batch.server.one_batch import BatchModel, OneBatch
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.config import ClusterConfig, resolve_config
from cluster.errors import ReplicaStartError
from cluster.lifecycle.shared_quotas import SharedQuotas
from cluster.openai.validation import unknown_model
from cluster.replica.orphans import watch_raylet
from cluster.router.directory import ReplicaDirectory
from cluster.router.dispatcher import Dispatcher
from cluster.router.models import served_model
from cluster.telemetry.logs import log_to_serve
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from engine.device.machine import settle_heap
from engine.errors import SquadronError
from engine.loader.fingerprint import model_identity, vocabulary_fingerprint

logger = logging.getLogger(__name__)

LEDGERS = "ledgers"


class Batches:
    """Serve builds one. settings / replicas: of each model, as the routers have them."""

    def __init__(self, settings: list[dict[str, Any]], replicas: list[DeploymentHandle[Any]]) -> None:
        log_to_serve(log_format=settings[0]["log_format"], process={"batches": os.getpid()})
        watch_raylet()
        try:
            configs = [resolve_config(one) for one in settings]
            keys = keys_for(configs[0].api_key, configs[0].api_key_file)
            store = _store(configs[0])
            batch_dir = str(configs[0].batch_dir)
            folder = ledger_folder(batch_dir)
            self._models = [_model(one, handle) for one, handle in zip(configs, replicas, strict=True)]
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        shared = configs[0]
        windows, holder = CompletionWindows(store.root), holders_of(keys)
        one_batch = OneBatch(
            store,
            folder,
            self._model_of,
            tenants_of(shared),
            shared.max_body_bytes,
            windows,
            is_url(batch_dir),
            quotas=RowQuotas(_quotas(shared), holder),
        )
        settle_heap()
        loop = asyncio.get_running_loop()
        self._keys = None if keys is None else loop.create_task(keys.watch())
        self._sweeper = loop.create_task(Sweeper(store, folder).run())
        runner = Runner(store, one_batch.run, windows, has_key=lambda name: holder(name) is not None)
        self._runner = loop.create_task(runner.run())

    def check_health(self) -> None:
        """Raise when batches are run no more (called by Serve)."""
        if self._runner.done():
            raise RuntimeError("the runner of batches has ended")

    def _model_of(self, name: str | None) -> BatchModel:
        for one in self._models:
            if name in one.model.names or (name is None and len(self._models) == 1):
                return one
        raise unknown_model(name or "", [known for one in self._models for known in one.model.names])


def tenants_of(config: ClusterConfig) -> Callable[[str], Tenant]:
    """Return what finds tenants by their names, as the routers do: on a server without keys all are one."""
    return lambda name: Tenant(name) if config.keyed else OPEN


def holders_of(keys: KeySource | None) -> Callable[[str], Tenant | None]:
    """Return what finds a tenant that has a valid key by its name. keys: None = a server without any."""
    return lambda name: OPEN if keys is None else keys.ring.holder(name)


def ledger_folder(batch_dir: str) -> Path:
    """Return where the ledgers of a server's batches lie.

    In its directory, where any runner finds them; for a URL on this machine, so that a batch whose machine is lost
    begins anew. There it is made for this user alone; raises `LedgerError` where it is another user's.
    """
    if not is_url(batch_dir):
        return Path(local_path(batch_dir)) / LEDGERS
    own = blake2b(batch_dir.encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"squadron-{LEDGERS}-{own}"
    make_private(folder)
    return folder


def _quotas(config: ClusterConfig) -> Quotas:
    """Return the quotas, in step with those of the app's routers. Without a key file there are none."""
    quotas = Quotas()
    if config.api_key_file is not None:
        app = serve.get_replica_context().app_name
        SharedQuotas(app, f"batches-{uuid4().hex}", quotas, asyncio.get_running_loop()).start()
    return quotas


def _store(config: ClusterConfig) -> Store:
    return Store(open_root(str(config.batch_dir)), config.max_file_bytes)


def _model(config: ClusterConfig, replicas: DeploymentHandle[Any]) -> BatchModel:
    dispatcher = Dispatcher(patient_config(config))
    vocabulary = vocabulary_fingerprint(config.source, config.tokenizer)
    scaled = config.max_replicas is not None
    # A model without replicas is left so until a batch asks for it.
    asleep = config.scales_to_zero
    name = f"batches-{uuid4().hex}"
    ReplicaDirectory(name, replicas, dispatcher, vocabulary, on_demand=scaled, rouse=lambda: not asleep)
    room = full_bounds(dispatcher, config.max_num_seqs, config.engine.token_budget)
    return BatchModel(
        model=served_model(config),
        source=dispatcher,
        backlog=Backlog(BackgroundBounds(room, dispatcher, config.batch_share)),
        metrics=Metrics().of(config.model_id, ReplicaSetStats),
        turns=TenantTurns(),
        fingerprint=model_identity(config.source, config.dtype, config.weight_form, config.hf_overrides),
        seed=config.seed,
        answer_settings=answer_settings(config),
    )
