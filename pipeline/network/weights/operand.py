"""What a product needs of a weight, whatever format it is stored in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.network.graph import Graph, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One linear's weight, or a stack of them ([E, …] in front), and what it does to input and output.

    weight: [in, out], or [out, in] if transposed, in the model's type.
    prescale: what the input is multiplied by first: [1, in], of a stack [E or 1, 1, in].
    step, quantized: the input is then rounded to that type ("fp8", "int8") in steps of that one float32 number.
    factors: float32, of a stack [E, 1, 1 or out]: what the product is multiplied by.
    """

    weight: Tensor
    transposed: bool
    prescale: Tensor | None = None
    step: Tensor | None = None
    quantized: str = ""
    factors: Tensor | None = None

    def prepare(self, at: Graph, x: Tensor) -> Tensor:
        """The input as the product takes it. TensorRT makes one kernel of equal ones, and takes the rounding's way back
        into the GEMM, which then multiplies 8-bit numbers."""
        if self.prescale is not None:
            x = at.product("prescaled", x, self.prescale)
        if self.step is None:
            return x
        return at.dequantize_as_model("input", at.quantize("input_quantized", x, self.step, self.quantized), self.step)

    def choose(self, at: Graph, indices: Tensor) -> Operand:
        """Of a stack, the entries that each token chose: [T, k, …] in the place of [E, …]."""
        prescale = self.prescale
        if prescale is not None and prescale.shape[0] > 1:
            prescale = at.gather("prescale_of_chosen", prescale, indices)
        elif prescale is not None:
            prescale = at.reshape("prescale_of_all", prescale, (1, 1, 1, prescale.shape[2]))
        factors = self.factors if self.factors is None else at.gather("factors_of_chosen", self.factors, indices)
        return replace(self, weight=at.gather("of_chosen", self.weight, indices), prescale=prescale, factors=factors)


def multiply(g: Graph, name: str, x: Tensor, operand: Operand) -> Tensor:
    """x [T, in] → [T, out] in the model's type; over stacks, leading dimensions broadcast."""
    at = g.at(name)
    x = operand.prepare(at, x)
    if operand.factors is None:
        return g.matmul(name, x, operand.weight, transpose=operand.transposed)
    product = at.cast(
        "product_float32", at.matmul("product", x, operand.weight, transpose=operand.transposed), "float32"
    )
    if g.dtype == "float32":
        return g.product(name, product, operand.factors)
    return g.cast(name, at.product("scaled", product, operand.factors), g.dtype)
