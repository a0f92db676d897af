"""Groups whose workers run vLLM's own pipeline parallelism, over a group's connections instead of torch's.

A leader has vLLM's scheduler in its engine process, and the first layers in another process. So it can load the whole
model into a second engine while the group works, and a process that has lost a neighbour never has to go on.
"""
