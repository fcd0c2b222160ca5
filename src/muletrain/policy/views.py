"""Views decide which replicas of a stage reduce together if not all of them reach each other.

Every member announces which members it counts on (its view); a round needs members with equal views. Views of a first
attempt are guesses, since a death may not be known everywhere. From the second attempt on, views tell who does not
reach whom. Then each member keeps to members that all reach each other as far as it knows, first those that count on
it, in the order of ids: members that know the same choose the same. A member outside of such a company yields to one
that is larger, or as large with a lower first member. That order is total, so some company always goes on, and of two
sides that both could, one does; and a member from which the others get nothing does not go on without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class GroupView(NamedTuple):
    """The members that one member counts on, itself included, in its attempt number ``attempt`` (from 0)."""

    attempt: int
    members: tuple[str, ...]


def counted_on(me: str, reached: Iterable[str], views: Mapping[str, GroupView]) -> tuple[str, ...]:
    """Returns the members that ``me``, who reaches ``reached``, counts on next; sorted. Those that count on ``me`` come
    first, unless that makes the company smaller: a member that tells each of the others that it counts on nobody else
    must not part them. Nor must one that few know yet, and whose id comes first: it may have accumulated nothing."""
    others = sorted(set(reached) - {me})

    def unsure(peer: str) -> bool:
        return not (peer in views and views[peer].attempt > 0 and me in views[peer].members)

    def chosen(order: Iterable[str]) -> tuple[str, ...]:
        found = [me]
        for peer in order:
            if all(_counts_on(peer, other, views) and _counts_on(other, peer, views) for other in found):
                found.append(peer)
        return tuple(sorted(found))

    found = max(chosen(sorted(others, key=unsure)), chosen(others), key=len)
    left_out = [p for p in others if p not in found]
    return max([found, *(chosen([p, *(o for o in others if o != p)]) for p in left_out)], key=len)


def yields(me: str, own: tuple[str, ...], views: Mapping[str, GroupView]) -> bool:
    """Does ``me``, in company ``own``, leave the step to others that go on without it? Members of a view that do not
    count on its owner go on without it: what one says of others lures nobody away."""

    def company(owner: str) -> list[str]:
        return [p for p in views[owner].members if p == owner or _counts_on(p, owner, views)]

    companies = (company(owner) for owner, v in views.items() if v.attempt > 0 and me not in v.members)
    return any((-len(c), min(c)) < (-len(own), min(own)) for c in companies)


def _counts_on(a: str, b: str, views: Mapping[str, GroupView]) -> bool:
    """Does ``a`` count on ``b``, as far as we know?"""
    return a not in views or views[a].attempt == 0 or b in views[a].members
