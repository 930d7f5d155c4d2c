"""A Ray head of its own, as an operator starts one: with a dashboard, which takes jobs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

from deploy.cli.processes import kill_all
from tests.e2e.harness import APP, App, eventually, free_port
from tests.lifetime import DIE_WITH_PARENT

SQUADRON = "from deploy.main import main; main()"
REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 90.0
JOB_SECONDS = 240.0
GRACE_SECONDS = 3.0  # that its processes have: nobody reads what they would still write


class RayHead:
    """`ray start --head --block` on loopback, with more variables. Leaving it ends all its processes."""

    def __init__(self, **environment: str) -> None:
        self._port, self.dashboard, self.agent = free_port(), free_port(), free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="head-", ignore_cleanup_errors=True)
        self.log = Path(self._folder.name) / "head.log"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SQUADRON_"))
        } | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **environment}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def jobs_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    def __enter__(self) -> Self:
        options = {
            "port": self._port,
            "dashboard-port": self.dashboard,
            "dashboard-agent-listen-port": self.agent,
            "node-ip-address": "127.0.0.1",
            "num-cpus": 8,
            "resources": '{"router": 1000}',  # as pods have that are for routers alone
            "object-store-memory": 100 * 2**20,
            "temp-dir": self._folder.name,
            "include-dashboard": "true",
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    DIE_WITH_PARENT + "from ray.scripts.scripts import main; main()",
                    "start",
                    "--head",
                    "--block",
                    *(f"--{name}={value}" for name, value in options.items()),
                ],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.client: JobSubmissionClient = eventually(self._connected, "the head takes jobs", START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        _, alive = psutil.wait_procs([*children, psutil.Process(self._process.pid)], timeout=GRACE_SECONDS)
        kill_all(alive)
        self._process.wait()
        self._folder.cleanup()

    def _connected(self) -> JobSubmissionClient | None:
        if self._process.poll() is not None:
            raise RuntimeError(self.log.read_text())
        try:
            return JobSubmissionClient(self.jobs_url)
        except (ConnectionError, RuntimeError):
            return None

    @contextmanager
    def serving(self, config: dict[str, Any]) -> Iterator[App]:
        """Serve a config on loopback, given to the head over its REST API as KubeRay and `serve deploy` do.

        Yields the app once all replicas are ready. Serve has ended afterwards, as it has before.
        """
        (name,) = [one["name"] for one in config["applications"]]
        url, port = self._serve_url, free_port()
        with httpx.Client(trust_env=False, timeout=60) as client:
            client.delete(url).raise_for_status()
            self.apply(config, port)

            def running() -> bool:
                found = client.get(url).raise_for_status().json()["applications"].get(name, {})
                return bool(found.get("status") == "RUNNING")

            eventually(running, f"the app {name} runs", 90)
            app = App(port, 2)
            app.wait_whole()
            yield app
            client.delete(url).raise_for_status()

    @property
    def _serve_url(self) -> str:
        return f"{self.jobs_url}/api/serve/applications/"

    def apply(self, config: dict[str, Any], port: int) -> None:
        """Give the head another config, as `serve deploy` would, and let Serve do what follows."""
        told = config | {"http_options": {"host": "127.0.0.1", "port": port}}
        httpx.put(self._serve_url, json=told, timeout=60, trust_env=False).raise_for_status()

    def submit(self, folder: Path, *arguments: str) -> str:
        """Submit `squadron batch` with a working directory, as `ray job submit --working-dir` does; return its id."""
        command = [sys.executable, "-c", SQUADRON, "batch", *arguments]
        variables = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": "1700000000"}
        environment = {"working_dir": str(folder), "env_vars": variables}

        def submitted() -> str | None:
            try:
                return self.client.submit_job(entrypoint=shlex.join(command), runtime_env=environment)
            except RuntimeError as error:
                if "No available agent" not in str(error):  # the head takes requests before its agent does
                    raise
                return None

        return eventually(submitted, "the head's agent takes jobs", START_SECONDS)

    def until_ended(self, job: str) -> JobStatus:
        """Wait for a job, and return how it ended."""
        eventually(lambda: self.client.get_job_status(job).is_terminal(), f"{job} ends", JOB_SECONDS)
        return self.client.get_job_status(job)

    def processes(self, job: str) -> list[psutil.Process]:
        """Processes of a job's driver."""
        return [one for one in self._started() if SQUADRON in _command(one) and "batch" in _command(one)]

    def routers(self) -> set[psutil.Process]:
        """Processes of the app's routers; those of another Ray of this process are none of the head's."""
        return {one for one in self._started() if f"ray::ServeReplica:{APP}:Router" in " ".join(_command(one))}

    def _started(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
