"""Tensors and symbolic numbers, the graph under construction, and its inputs."""
