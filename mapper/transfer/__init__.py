"""Tensors in memory and on disk: a plan bound to a model, files read by slices, boxes copied."""
