"""A Ray cluster of nodes that are started apart, and an application on it by `serve run`, as on real machines."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import yaml
from ray_processes import MODEL, START_S, free_port

BIN = Path(sys.executable).parent
MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "ray-service.yaml"
KEY = "sk-test"
SMALL = {"kv_memory": "64MiB", "max_model_len": 1024, "num_threads": 1, "drain_timeout": 5, "model": MODEL}


def serve_config(port, deployments=(), **arguments):
    """Returns the Serve config file that the KubeRay manifest has, with other arguments."""
    config = yaml.safe_load(yaml.safe_load(MANIFEST.read_text())["spec"]["serveConfigV2"])
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    del application["args"]["replicas"]
    application["args"].update({**SMALL, **arguments})
    application["deployments"] = [*deployments]
    return config


class Cluster:
    """Runs until the `with` ends. folder: a short path, for sockets. host: the head's address."""

    def __init__(self, folder, host="127.0.0.1"):
        self.folder, self.host, self.port = Path(folder), host, free_port()
        self.url = f"http://{host}:{self.port}"
        self.address = f"{host}:{free_port()}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex(),
            "PAGEMILL_API_KEY": KEY, "RAY_ADDRESS": self.address,
        }  # fmt: skip
        self.nodes, self._started = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        for process in reversed(self._started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, *command, name):
        """Starts a command whose output goes to a file in the folder."""
        with open(self.folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [str(each) for each in command], stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self._started.append(process)
        return process

    def start_head(self, *flags):
        host, _, port = self.address.rpartition(":")
        self._start_node(host, "--head", "--include-dashboard=false", "--port", port, "--temp-dir", self.folder, *flags)

    def start_node(self, host, *flags, within=()):
        """Starts a further node. within: a command that runs another one on another host."""
        self._start_node(host, "--address", self.address, *flags, within=within)

    def _start_node(self, host, *flags, within=()):
        common = ["--block", "--disable-usage-stats", "--node-ip-address", host, "--object-store-memory", 80 << 20]
        self.nodes.append(self.run(*within, BIN / "ray", "start", *common, *flags, name=f"node{len(self.nodes)}"))

    def apply(self, config):
        """Applies a config file to a cluster that serves."""
        subprocess.run(
            [BIN / "serve", "run", "--non-blocking", self._written(config)],
            check=True, capture_output=True, env=self.environment,
        )  # fmt: skip

    def serve(self, config):
        """Applies a config file, and waits until requests are answered."""
        path = self._written(config)
        deadline, process = time.monotonic() + START_S, None
        while time.monotonic() < deadline:
            if process is None or process.poll() is not None:  # else the head was not there yet
                process = self.run(BIN / "serve", "run", path, name="serve")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/v1/models", headers=self.headers, timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError((self.folder / "serve.log").read_text()[-3000:])

    def _written(self, config):
        path = self.folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    @property
    def headers(self):
        return {"Authorization": f"Bearer {KEY}"}

    def client(self):
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=120)
