"""Groups whose workers run vLLM: its own pipeline parallelism, over a group's connections instead of torch's.

A leader has vLLM's scheduler in its engine process, and the first layers in a process of their own beside it. So it can
load the whole model into a second engine while the group works, and no process that has lost a neighbour goes on.
"""
