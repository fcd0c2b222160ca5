"""Who is measured with whom, and when: every pair once, and nobody in two pairs at a time, which would halve what each
sees."""

from __future__ import annotations


def rounds(players: int) -> list[list[tuple[int, int]]]:
    """Of 0 .. ``players`` - 1, by the circle method of round-robin tournaments: one stays in its place, the others go
    round. As few as can be: ``players`` - 1, or ``players`` where that is odd, for one pauses in each then."""
    seats = [*range(players), *([-1] if players % 2 else [])]
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]
