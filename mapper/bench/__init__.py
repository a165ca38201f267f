"""How fast mapper is beside the loaders people use: the same inputs, fresh processes in turn, the same start and end events.

`inputs` makes checkpoints, `samples` are what one process measures, `run` starts the processes and `table` shows the ratios.
"""
