"""Executes a network's program on the CPU in PyTorch: the proof of what TensorRT is asked to compile, and what serves
where there is no GPU. Imports torch; knows no TensorRT and no config."""
