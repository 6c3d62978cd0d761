"""Maximum flow and minimum cut by Dinic's algorithm, on Python integers (capacities of any size).

Dinic (1970): find the levels of all vertices by breadth-first search in the residual graph, push
flow along level-increasing paths until none is left (a blocking flow), repeat until the sink cannot
be reached. Iterative throughout, because joint graphs are deeper than Python's stack.
"""

from __future__ import annotations

INFINITY = 1 << 62
"""More than any sum of tensor sizes."""


class FlowNetwork:
    """A directed network with capacities; edges are stored in pairs, forward and residual."""

    def __init__(self, num_vertices: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(num_vertices)]
        self._head: list[int] = []
        self._room: list[int] = []

    def add_edge(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge; its residual twin is the edge with the number next to it."""
        if capacity < 0:
            raise ValueError(f"negative capacity {capacity}")
        self._out[tail].append(len(self._head))
        self._out[head].append(len(self._head) + 1)
        self._head += (head, tail)
        self._room += (capacity, 0)

    def max_flow(self, source: int, sink: int) -> int:
        """Push as much flow as possible and return how much it is. Call once per network."""
        total = 0
        while True:
            levels = self._levels(source)
            if levels[sink] < 0:
                return total
            total += self._blocking_flow(source, sink, levels)

    def source_side(self, source: int) -> list[bool]:
        """After `max_flow`: which vertices the minimum cut nearest to the source leaves with it."""
        return [level >= 0 for level in self._levels(source)]

    def _levels(self, source: int) -> list[int]:
        out, head, room = self._out, self._head, self._room
        levels = [-1] * len(out)
        levels[source] = 0
        frontier = [source]
        while frontier:
            following: list[int] = []
            for vertex in frontier:
                for edge in out[vertex]:
                    if room[edge] and levels[head[edge]] < 0:
                        levels[head[edge]] = levels[vertex] + 1
                        following.append(head[edge])
            frontier = following
        return levels

    def _blocking_flow(self, source: int, sink: int, levels: list[int]) -> int:
        """Depth-first search with one cursor per vertex; dead ends are never entered twice."""
        out, head, room = self._out, self._head, self._room
        cursor = [0] * len(out)
        path: list[int] = []
        vertex, total = source, 0
        while True:
            if vertex == sink:
                pushed = min(room[edge] for edge in path)
                total += pushed
                full = 0
                for place in reversed(range(len(path))):
                    room[path[place]] -= pushed
                    room[path[place] ^ 1] += pushed
                    if not room[path[place]]:
                        full = place
                vertex = head[path[full] ^ 1]
                del path[full:]
                continue
            edges = out[vertex]
            while cursor[vertex] < len(edges):
                edge = edges[cursor[vertex]]
                if room[edge] and levels[head[edge]] == levels[vertex] + 1:
                    break
                cursor[vertex] += 1
            if cursor[vertex] < len(edges):
                path.append(edge)
                vertex = head[edge]
            elif path:
                vertex = head[path.pop() ^ 1]
                cursor[vertex] += 1
            else:
                return total
