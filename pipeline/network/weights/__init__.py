"""A checkpoint's weights as the network wants them, one module per format in which they may be stored."""

from pipeline.network.weights.lowering import lower, lower_stack
from pipeline.network.weights.operand import Operand, multiply
from pipeline.network.weights.source import Weights

__all__ = ["Operand", "Weights", "lower", "lower_stack", "multiply"]
