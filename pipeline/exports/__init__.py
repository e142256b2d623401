"""Engine checkpoints, 16-bit and quantized, as others serve them: one module per format, and the table in formats.py.

Nothing is quantized here (but for zero points, where those are asked for): the numbers written are those that
were proved. What a format cannot hold exactly is refused, or written in 16 bits where the user says so.
"""
