"""The rule that chooses the champion among the versions of a model.

`champion-DATASET` is the best version of a dataset; `champion` is the version that last took such an alias. The rule:

1. A version is a *candidate* if its tags state the question (dataset, norm, eps: its tag `headline`), the weights and
   test shards of its certificate, and at least `champion_images` images (300 unless its publisher set another number).
2. Only answers to one *question* are compared: the same dataset, test shards, norm and eps. The question is that of
   the alias's holder; without a holder, the candidate's own. A version with another question cannot win.
3. The best version has the highest certified lower bound (`certified_low.EPS`: Wilson's of 95 %), so that few images
   weigh little. Versions with 300 images rank above all with fewer. Between equals the first registered wins.
4. A version that was promoted by hand against the rule (tag `champion_by` = hand) stays until the next promotion by
   hand. Promoting the version that the rule would choose returns the alias to the rule.

All writers decide by the same tags. A writer that has moved an alias checks the result again.

A version gets the tag `champion_by` before the aliases, and the next champion takes the tag away. An election therefore
compares the new version with the few that have the tag: the holder, and those that other writers elect meanwhile. Only
an election without a holder, and a promotion by hand, read every version of a question.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from certizoo import UserError
from certizoo.registry.server import store
from certizoo.registry.versions import version_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
BY, HAND, RULE = "champion_by", "hand", "rule"
IMAGES = "champion_images"  # tag: the least number of images that the publisher wants for a champion's certificate
ENOUGH = 300
ASKED = ("dataset", version_tags.DATA, "norm", "headline")

Tags = Mapping[str, str]


@dataclass(frozen=True)
class Standing:
    """The result of an election: is the version the champion of its dataset? If not, `why` says so in words."""

    is_champion: bool
    why: str = ""


def refuse_given(images: object) -> None:
    """Raise UserError if `champion_images` is not a number of images."""
    if isinstance(images, bool) or not isinstance(images, int) or images < 1:
        raise UserError(f"champion_images={images}: give a whole number of images above 0, such as 300")


def dataset_alias(dataset: str) -> str:
    return f"{CHAMPION}-{re.sub(r'[^A-Za-z0-9_-]', '_', dataset)}"


def elect_champion(client: "MlflowClient", name: str, version: str) -> Standing:
    """Give the aliases to the best version by the rule, and say if that is `version`.

    Then check again: another process may have elected a better version meanwhile, whose aliases were just taken.
    """
    board = Board.read(client, name, version)
    while (winner := board.winner(version)) not in (None, board.holder):
        _give(client, board, winner)
        board = Board.read(client, name, version)
    if winner is not None:
        for loser in (v for v, tags in board.tags.items() if v != board.holder and tags.get(BY) == RULE):
            store.found(client.delete_model_version_tag, name, loser, BY)
    return Standing(True) if board.holder == version else Standing(False, board.why_not(version))


def promote(client: "MlflowClient", name: str, version: str) -> None:
    """Give `version` the aliases, even against the rule; it then keeps them until the next promotion."""
    board = Board.read(client, name, version, every=True)
    by = RULE if board.by_rule(version) == version else HAND
    for other in board.by_hand():
        store.put(client.set_model_version_tag, name, other, BY, RULE)
    store.put(client.set_model_version_tag, name, version, BY, by)
    for alias in (CHAMPION, board.alias):
        store.put(client.set_registered_model_alias, name, alias, version)


def against_rule(client: "MlflowClient", name: str, version: str) -> str:
    """Return why the rule would not give the aliases to `version`; '' if it would."""
    board = Board.read(client, name, version, every=True)
    return "" if board.by_rule(version) == version else board.why_not(version)


@dataclass(frozen=True)
class Board:
    """The versions of a model on one dataset that may win, by their tags, and the holder of the dataset's alias."""

    name: str
    alias: str
    tags: Mapping[str, Tags]
    holder: str | None
    overall: Tags  # of the version with the alias `champion`, on any dataset

    @classmethod
    def read(cls, client: "MlflowClient", name: str, version: str, *, every: bool = False) -> "Board":
        """Read `version`, whose dataset it is, and those with the tag, or `every` one of its question."""
        own = client.get_model_version(name, version).tags
        dataset = own.get("dataset", "")
        alias = dataset_alias(dataset)
        overall, holder = (store.found(client.get_model_version_by_alias, name, key) for key in (CHAMPION, alias))
        tags: dict[str, Tags] = _search(client, name, f"tags.{BY} LIKE '%'") | {version: own}
        tags |= {str(holder.version): holder.tags} if holder else {}
        if every or ((holder is None or any(_missing(holder.tags))) and not any(_missing(own))):
            tags |= _search(client, name, equal={tag: own[tag] for tag in ASKED if tag in own})
        rivals = {number: t for number, t in tags.items() if t.get("dataset", "") == dataset}
        held = str(holder.version) if holder else None
        return cls(name, alias, rivals, held if held in rivals else None, overall.tags if overall else {})

    def winner(self, asking: str) -> str | None:
        """Return the version that should hold the alias, as `asking` sees it; None if there is none."""
        return next(iter(self.by_hand()), None) or self.by_rule(asking)

    def by_hand(self) -> list[str]:
        return sorted((v for v, tags in self.tags.items() if tags.get(BY) == HAND), key=int, reverse=True)

    def by_rule(self, asking: str) -> str | None:
        """Return the best answer to the holder's question or, without a holder, to that of `asking`."""
        asked = self.holder if self.holder and not any(_missing(self.tags[self.holder])) else asking
        rivals = [v for v, tags in self.tags.items() if _is_candidate(tags, self.tags[asked])]
        return max(rivals, key=lambda v: (*rank(self.tags[v]), -int(v)), default=None)

    def why_not(self, version: str) -> str:
        """Return why the rule does not choose `version`, with both figures."""
        tags, holder = self.tags[version], self.holder
        reasons = list(_missing(tags))
        if reasons or holder is None:
            return "; ".join(reasons) or "another version is as good"
        held = f"{self.name}/{holder} ({figure(self.tags[holder])})"
        if holder in self.by_hand():
            return f"{held} was promoted by hand; its own figure is {figure(tags)}"
        other = list(_differences(tags, self.tags[holder]))
        if other:
            return f"its figures cannot be compared with those of {held}: {', '.join(other)}"
        return f"{figure(tags)} does not beat {held}"


def figure(tags: Tags) -> str:
    """Return text such as 'certified_acc.0.1 0.4200, at least 0.3775, on 500 images'."""
    headline = tags.get("headline", "?")
    low = tags.get(_low(tags), "?")
    return f"{headline} {tags.get(headline, '?')}, at least {low}, on {tags.get('images', '?')} images"


def rank(tags: Tags) -> tuple[bool, float]:
    """Return the key to compare candidates by."""
    return _count(tags.get("images")) >= ENOUGH, version_tags.number(tags[_low(tags)])


def _is_candidate(tags: Tags, question: Tags) -> bool:
    return not any(_missing(tags)) and not any(_differences(tags, question))


def _missing(tags: Tags) -> Iterator[str]:
    """List what keeps a version from being a candidate."""
    for tag in (*ASKED, version_tags.WEIGHTS):
        if not tags.get(tag):
            yield f"its tag {tag} is missing"
    shares = [version_tags.number(tags.get(tag, "")) for tag in (_low(tags), tags.get("headline", ""))]
    if not shares[0] <= shares[1]:  # also refuses NaN
        yield f"it has no certified share with a lower bound ({_low(tags)})"
    if _count(tags.get("images")) < _wanted(tags):
        yield f"its {tags.get('images', 'unknown')} images are fewer than {IMAGES}={_wanted(tags)}"


def _differences(tags: Tags, question: Tags) -> Iterator[str]:
    """List the differences of the questions."""
    for tag in ASKED:
        if tags.get(tag) != question.get(tag):
            yield f"{tag} {tags.get(tag, '?')[:24]} instead of {question.get(tag, '?')[:24]}"


def _wanted(tags: Tags) -> int:
    return _count(tags.get(IMAGES)) or ENOUGH


def _low(tags: Tags) -> str:
    return f"{version_tags.LOW}.{tags.get('headline', '').removeprefix(f'{version_tags.CERTIFIED}.')}"


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else 0


def _give(client: "MlflowClient", board: Board, winner: str) -> None:
    """Set the dataset's alias, and `champion` unless a version of another dataset holds that by hand."""
    by = HAND if board.tags[winner].get(BY) == HAND else RULE
    store.put(client.set_model_version_tag, board.name, winner, BY, by)
    elsewhere = board.overall.get("dataset") != board.tags[winner].get("dataset")
    if not (elsewhere and board.overall.get(BY) == HAND):
        store.put(client.set_registered_model_alias, board.name, CHAMPION, winner)
    # last: its holder then has every alias
    store.put(client.set_registered_model_alias, board.name, board.alias, winner)


def _search(client: "MlflowClient", name: str, *more: str, equal: Tags = MappingProxyType({})) -> dict[str, Tags]:
    query = store.query(name, equal, *more)
    return {str(v.version): v.tags for v in store.every(client.search_model_versions, filter_string=query)}
