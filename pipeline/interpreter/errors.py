"""What the interpreter refuses: a layer it does not execute, or feeds that do not fit the program."""

from pipeline.errors import CompatibilityError


class UnsupportedLayerError(CompatibilityError):
    """A layer, or a value of one of its attributes, whose meaning the interpreter does not implement."""

    def __init__(self, layer: str, problem: str) -> None:
        super().__init__(
            f"layer {layer}: {problem}",
            hint="write the network with a layer that pipeline/interpreter/operations executes, or add it there",
        )


class FeedError(CompatibilityError):
    """An input that is missing, unknown, of another type, or of a shape that the program does not declare."""


class ExecutionError(CompatibilityError):
    """A layer that could not compute on these inputs: an index out of range, shapes that do not fit."""

    def __init__(self, layer: str, cause: Exception) -> None:
        super().__init__(f"layer {layer}: {cause}", hint="the inputs of this step do not fit the network")
