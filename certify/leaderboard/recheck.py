"""The recheck of an entry: its weights, images and clean accuracy in full, certificates and attacks of a sample.

The sample and the random starts of norms are drawn during the check, so that nobody can prepare for them. If a claim
says that K of N images are certified, the number k among n sampled images has the hypergeometric distribution,

    P(k) = C(K, k) C(N - K, n - k) / C(N, n),

and the claim is refused if k or fewer have a probability below DOUBT. With N = 1000, 50 images refuse a
claim that is too high by 32 points, 200 one by 15, 500 one by 8, and all images one by more than ALLOWED. With the rows
behind the claim (rows.py) each image of the sample is compared by itself. A claim that is too low is no fault: later
versions of a method prove more.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path

import torch

import zoo
from certify.leaderboard import nonces
from certify.leaderboard.entry import Entry, faults, points
from certify.leaderboard.of_results import parameters_of
from certify.leaderboard.rows import Rows, forged, shares
from certify.methods import METHODS
from certify.methods.served import require_served
from certify.rows import images
from certify.rows.row_schema import Row
from certify.rows.workers import Batch
from certify.stage.certify_batch import CertifyBatch
from certify.stage.outcomes import CERTIFIED, DEFAULT_ATTACK
from certify.stage.settings import Settings
from certizoo import UserError, shards
from certizoo.progress import Progress, silent
from zoo.bounds import lanczos

DOUBT = 1e-5  # probability that a right claim is refused, at each of its points
ALLOWED = 0.01  # share of images that may be certified with one nonce, rounding or kernel and not with another
TIE = 1e-4  # margin, in logits, whose sign rounding may change


@dataclass(frozen=True)
class Found:
    """The findings in words, and those that contradict the entry."""

    words: list[str]
    wrong: list[str]


def check(
    entry: Entry,
    handover: Path,
    data: shards.DataConfig,
    sample: int,
    claimed: Rows,
    progress: Progress = silent,
) -> Found:
    """Recheck an entry: first what costs least, and the sample only if everything else is right.

    Args:
        entry: the claim.
        handover: the model.
        data: the test images.
        sample: number of images to certify again.
        claimed: the rows behind the entry, {} if they are unknown.
        progress: called after every batch.

    Raises:
        UserError: the entry cannot be rechecked.
        UnsoundCertificate: an attack changed the class of a certified image.
    """
    if entry["published"]:
        raise UserError(f"{entry['name']} is a figure published by others, which no command here can recheck")
    if entry["method"] not in METHODS:
        raise UserError(f"method {entry['method']!r} cannot be rechecked; it is none of {', '.join(METHODS)}")
    require_served(entry["served_dtype"], entry["method"], "the entry's served_dtype")
    wrong = [*faults(entry), *_weights(entry, handover), *nonces.of_entry(entry)]
    if wrong:
        return Found([], wrong)  # the figures of other weights would say nothing
    listed = images.image_list(data, entry["images"], 50)
    if (listed.total, listed.sha256) != (entry["images"], entry["images_sha256"]):
        return Found([], [f"the {listed.total} test images of {data.root} are not those of the entry (images_sha256)"])
    words, wrong = [f"weights, {entry['parameters']} parameters", f"nonces: {nonces.origins(entry)}"], []
    low, high = _clean(handover, listed)
    words.append(f"clean {100 * high / listed.total:.4g} of {listed.total} images")
    claimed_clean, rounded = entry["clean"] * listed.total / 100, 1e-6 * listed.total  # entries hold four places
    if not low - rounded <= claimed_clean <= high + rounded:
        wrong.append(f"clean is {100 * high / listed.total:.4g}, not {entry['clean']}")
    wrong += shares(entry, claimed)
    if wrong:
        return Found(words, wrong)
    words.append(f"certified again, like the entry: {_words(entry['served_dtype'])}")
    picked = frozenset(random.SystemRandom().sample(range(listed.total), min(sample, listed.total)))
    for norm in entry["curves"]:
        rows = list(_rows(entry, norm, handover, listed, picked, progress))
        for said, fault in _held(entry, norm, rows, listed.total):
            words.append(said)
            wrong += [fault] if fault else []
        wrong += forged(norm, rows, claimed, entry["method"])
    return Found(words, wrong)


def _words(served_dtype: str | None) -> str:
    return f"the model as served in {served_dtype}" if served_dtype else "the float64 function"


def _weights(entry: Entry, handover: Path) -> Iterator[str]:
    digest = zoo.handover.weights_sha256(handover)
    if digest != entry["weights_sha256"]:
        yield f"the weights in {handover} have sha256 {digest[:16]}..., not {str(entry['weights_sha256'])[:16]}..."
        return
    count = parameters_of(zoo.handover.read_config(handover)["model"])
    if count != entry["parameters"]:
        yield f"the model has {count} parameters, not {entry['parameters']}"


def _clean(handover: Path, listed: images.ImageList) -> tuple[int, int]:
    """Return the least and the largest number of correctly classified images; ties count for both."""
    model, _ = zoo.handover.load(handover)
    low = high = 0
    with torch.no_grad():
        for _, images_BCHW, labels_B in listed.batches():
            logits_BJ = model(images_BCHW)
            own_B = logits_BJ.gather(1, labels_B[:, None]).squeeze(1)
            others_BJ = logits_BJ.scatter(1, labels_B[:, None], -torch.inf)
            margin_B = own_B - others_BJ.amax(1)
            low, high = low + int((margin_B > TIE).sum()), high + int((margin_B > -TIE).sum())
    return low, high


def _rows(
    entry: Entry,
    norm: str,
    handover: Path,
    listed: images.ImageList,
    picked: frozenset[int],
    progress: Progress,
) -> Iterator[Row]:
    """Yield the stage's own rows of the picked images, with a newly drawn nonce."""
    grid = tuple(eps for of, eps, _ in points(entry) if of == norm)
    settings = Settings(
        method=entry["method"],
        norm=norm,
        eps=grid,
        headline_eps=grid[0],
        attack=replace(DEFAULT_ATTACK, steps=_steps(entry, norm)),
        nonce=lanczos.new_nonce(),
        served_dtype=entry["served_dtype"],
    )
    work, place, done = CertifyBatch(handover, settings=settings), 0, 0
    for batch in listed.batches():
        chosen = [i for i in range(len(batch[0])) if place + i in picked]
        place += len(batch[0])
        if chosen:
            yield from work(_part(batch, chosen))
            done += len(chosen)
            progress(done, len(picked))


def _part(batch: Batch, chosen: list[int]) -> Batch:
    return [batch[0][i] for i in chosen], batch[1][chosen], batch[2][chosen]


def _steps(entry: Entry, norm: str) -> int:
    """Return the steps of the entry's PGD; the default where it names another attack."""
    names = [str(point["attack"]) for of, _, point in points(entry) if of == norm]
    steps = [int(name.removeprefix("PGD-")) for name in names if name.removeprefix("PGD-").isdecimal()]
    return min(max(steps, default=DEFAULT_ATTACK.steps), 1000)


def _held(entry: Entry, norm: str, rows: list[Row], total: int) -> Iterator[tuple[str, str | None]]:
    """Yield (the finding, the fault of the claim or None) at every eps."""
    n = len(rows)
    for of, eps, point in points(entry):
        if of != norm:
            continue
        certified = sum(row[f"certified.{eps:g}"] == CERTIFIED for row in rows)
        survive = sum(bool(row[f"pgd.{eps:g}"]) for row in rows)
        claim, attacked = point["certified"], point["attacked"]
        where = f"{norm} {eps:g}"
        shown = f"certified {100 * certified / n:.4g} (claimed {claim}), attacked {100 * survive / n:.4g} ({attacked})"
        said = f"{where}, {n} images: {shown}"
        fault = None
        if claim is not None and not likely(certified, n, claim * total / 100, total):
            fault = f"{where}: {certified} of {n} images are certified again, {claim} % are claimed"
        elif attacked is not None and not likely(survive, n, attacked * total / 100, total):
            fault = f"{where}: {survive} of {n} images survive an attack, {attacked} % are claimed"
        yield said, fault


def likely(seen: int, n: int, claimed: float, total: int) -> bool:
    """Return whether `seen` of n sampled images are enough for a claim of `claimed` among `total`, within ALLOWED."""
    fewest = max(0, round(claimed - ALLOWED * total))
    return _tail(fewest, n, total, range(seen + 1)) >= DOUBT


def _tail(marked: int, n: int, total: int, values: range) -> float:
    """Return P(k in values) for the number k of sampled images among the `marked` of `total`."""
    return sum(comb(marked, k) * comb(total - marked, n - k) for k in values) / comb(total, n)
