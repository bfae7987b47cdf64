"""FleetLLM: an `AsyncLLM` whose engine is several replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagemill.distributed.fleet import Fleet
from pagemill.distributed.routing import RoutingPolicy
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.client import EngineKeeper, ServedEngine
from pagemill.frontend.supervisor import RestartLimits

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class FleetLLM(AsyncLLM):
    """Serves one model from the replicas of a Ray Serve deployment. Takes and raises what `AsyncLLM` does.

    replicas: their deployment's handle. routing: which of them a request goes to. prefill_replicas: how many of them
    compute prompts alone.
    """

    def __init__(
        self,
        model: str,
        replicas: DeploymentHandle[Any],
        routing: RoutingPolicy,
        prefill_replicas: int = 0,
        **settings: Any,
    ) -> None:
        self._replicas = replicas
        self._prefill_replicas = prefill_replicas
        self._routing = routing
        super().__init__(model, **settings)

    def start_engine(self, restarts: RestartLimits) -> tuple[ServedEngine, EngineKeeper]:
        """Connects to the replicas, which Ray Serve starts, and starts again."""
        fleet = Fleet(self.config, self._replicas, self._routing, restarts, self._prefill_replicas)
        return fleet, fleet
