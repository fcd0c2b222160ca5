"""Order measurements between pairs: every pair once, and no peer in two at a time, which would halve both results."""

from __future__ import annotations


def rounds(players: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of 0 .. ``players`` - 1 by the circle method of round-robin tournaments, as few as possible:
    ``players`` - 1, or ``players`` if that is odd, because one pauses in each."""
    seats = [*range(players), *([-1] if players % 2 else [])]
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]
