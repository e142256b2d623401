"""How serving a request can fail. Each reaches the request's own handle, and no other's."""

from pipeline.errors import TrtseekError


class ServingError(TrtseekError):
    """Base of all that can go wrong with one request."""

    exit_code = 10


class RequestError(ServingError):
    """A request that cannot be run as it is. `field` names what is wrong with it."""

    def __init__(self, field: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{field} {problem}", hint=hint)
        self.field = field


class QueueFullError(ServingError):
    """The queue of the request's priority class is at its limit; nothing was queued."""


class QueueTimeoutError(ServingError):
    """The request waited longer than it allows, and was never started."""


class NonFiniteError(ServingError):
    """The network gave logits that are not finite; only the request they belong to fails."""


class RunnerError(ServingError):
    """The runner failed in a step of this request, or lost the blocks that it needs."""


class ShutdownError(ServingError):
    """The executor takes no more requests, or stopped before this one ended."""
