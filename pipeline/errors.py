"""Every error a user can meet: a message that names what is wrong, a hint that says what to do, an exit code.

Exit codes are part of the command line's contract (release pipelines branch on them); README lists them.
"""


class TrtseekError(Exception):
    """Base of all errors that are the user's to solve. `message` names the file, key or tensor; `hint` the way out."""

    exit_code = 1
    outcome = "failed"  # of the stage that raises it

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


def spell_reason(error: Exception) -> str:
    """What an error says, for a message that names the file already: an OSError would name it again."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


class ConfigError(TrtseekError):
    """The YAML, or a value in it, cannot be read."""

    exit_code = 2


class CheckpointError(TrtseekError):
    """A checkpoint's files are missing, damaged, contradictory or of a kind that is not read."""

    exit_code = 3


class CompatibilityError(TrtseekError):
    """A combination of model, target and settings that cannot work; refused before any work is done."""

    exit_code = 4


class GateError(TrtseekError):
    """A verification gate failed; the stage's report is kept."""

    exit_code = 5


class BuildError(TrtseekError):
    """TensorRT refused the network, or the build process died."""

    exit_code = 6


class StoreError(TrtseekError):
    """The artifact store cannot be written or read: disk full, permissions, a lock held by another run."""

    exit_code = 7


class QuantizationError(TrtseekError):
    """Calibration or packing cannot go on (too little text, non-finite activations, a dimension no group divides)."""

    exit_code = 8


class PackageError(TrtseekError):
    """A model repository or release folder fails its own checks."""

    exit_code = 9


class PendingError(TrtseekError):
    """Nothing failed: a stage's work has to be done on another host. What that takes is ready."""

    exit_code = 12
    outcome = "waiting"
