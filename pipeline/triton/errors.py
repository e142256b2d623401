"""How a server, rather than one of its requests, can fail."""

from pipeline.errors import TrtseekError


class ServerError(TrtseekError):
    """tritonserver is absent, does not start, does not load a model, or does not answer."""

    exit_code = 11
