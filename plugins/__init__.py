"""Operations that TensorRT has no layer for, or no fast one: one folder per plugin.

Each has a contract (operation), a kernel in OpenAI Triton, and a reference in plain torch that the interpreter runs.
docs/adding-a-plugin.md says how to add one."""
