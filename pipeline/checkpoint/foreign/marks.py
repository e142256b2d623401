"""Tensors that say, by their names, that another tool has quantized the model. Apart, since `plan` needs no more."""

MARKS = (".qweight", ".weight_packed", ".weight_scale")
