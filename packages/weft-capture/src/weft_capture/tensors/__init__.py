"""Tensors, symbolic numbers, the graph that calls of them become, and its inputs."""
