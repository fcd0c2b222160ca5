"""Views decide which replicas of a stage reduce together if some cannot reach each other.

Every member announces a view, the members to count on; a round needs members with equal views. Views of a first attempt
are guesses, since a death may not be known everywhere. From the second attempt on, views show missing connections. Then
each member X chooses a company of members with all mutual connections known to work, members that count on X first, in
the order of ids: equal knowledge gives equal choices. A member outside of a company yields to a larger company, or to
an equal one with a lower first member. That order is total, so some company always goes on, and of two viable sides,
one does; and a member from which the rest get nothing does not go on alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class GroupView(NamedTuple):
    """The members that one member counts on, including the member, in attempt number ``attempt`` (from 0)."""

    attempt: int
    members: tuple[str, ...]


def counted_on(me: str, reached: Iterable[str], views: Mapping[str, GroupView]) -> tuple[str, ...]:
    """Returns the members that ``me``, who reaches ``reached``, counts on next; sorted. Members that count on ``me``
    come first, unless that makes the company smaller: a member that claims to each peer to count on nobody else must
    not split a company. Nor must a little-known member with the first id, which may have accumulated nothing."""
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
    """Does ``me``, in company ``own``, leave the step to another company? Members of a view that do not count on the
    view's owner are not in the owner's company: no member can be lured away by a third one's claim."""

    def company(owner: str) -> list[str]:
        return [p for p in views[owner].members if p == owner or _counts_on(p, owner, views)]

    companies = (company(owner) for owner, v in views.items() if v.attempt > 0 and me not in v.members)
    return any((-len(c), min(c)) < (-len(own), min(own)) for c in companies)


def _counts_on(a: str, b: str, views: Mapping[str, GroupView]) -> bool:
    """Does ``a`` count on ``b``, as far as we know?"""
    return a not in views or views[a].attempt == 0 or b in views[a].members
