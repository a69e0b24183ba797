"""An entry done again: its weights, its images and clean accuracy as a whole, certificates and attacks of a sample.

Which images the sample is, and the random starts of norms, are drawn now: nobody could prepare for them. Of n images of
N, of which a claim says that K are certified, the number k that is found has the hypergeometric distribution,

    P(k) = C(K, k) C(N - K, n - k) / C(N, n),

and a claim is refused where a tail as far out as k has a probability below DOUBT. Of 1000 images 50 refuse one that is
off by 32 points, 200 one by 15, 500 one by 8, all of them one by more than ALLOWED; with the rows behind the claim
(rows.py) each image of the sample counts for itself.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path

import torch

import shards
import zoo
from certify.leaderboard import nonces
from certify.leaderboard.entry import Entry, faults, points, served_in
from certify.leaderboard.of_results import parameters_of
from certify.leaderboard.rows import Rows, forged, shares
from certify.methods import METHODS
from certify.methods.served import require_served
from certify.rows import images
from certify.rows.progress import Progress, silent
from certify.rows.row_schema import Row
from certify.rows.workers import Batch
from certify.stage.certify_batch import CertifyBatch
from certify.stage.outcomes import CERTIFIED, DEFAULT_ATTACK
from certify.stage.settings import Settings
from certizoo import UserError
from zoo.bounds import lanczos

DOUBT = 1e-5  # of a right claim to be refused, at each of its points
ALLOWED = 0.01  # of the images may be certified with one nonce, rounding or kernel, and not with another
TIE = 1e-4  # a margin, in logits, that rounding may turn over


@dataclass(frozen=True)
class Found:
    """What was seen, in words, and what of it contradicts the entry."""

    words: list[str]
    wrong: list[str]


def check(
    entry: Entry,
    handover: Path,
    data: shards.DataConfig,
    sample: int,
    claimed: Rows,
    served_dtype: str | None = "float32",
    progress: Progress = silent,
) -> Found:
    """`claimed`: the rows behind the entry, {} if they are not known; `served_dtype`: as in configs/certify.yaml.
    What costs least comes first, and the sample only if all else is right. Raises UserError where the entry cannot be
    done again, UnsoundCertificate where a certified image falls."""
    if entry["published"]:
        raise UserError(f"{entry['name']} is a published figure of others, which no command here does again")
    if entry["method"] not in METHODS:
        raise UserError(f"method {entry['method']!r} is none of ours ({', '.join(METHODS)}): it cannot be done again")
    require_served(served_dtype, entry["method"], "served_dtype")
    if claimed and served_in(entry) != served_dtype:
        of = served_in(entry) or "null"
        raise UserError(f"the rows are those of served_dtype={of}; hold them against that, or leave results= out")
    wrong = [*faults(entry), *_weights(entry, handover), *nonces.of_entry(entry)]
    if wrong:
        return Found([], wrong)  # other weights, other figures
    listed = images.image_list(data, entry["images"], 50)
    if (listed.total, listed.sha256) != (entry["images"], entry["images_sha256"]):
        return Found([], [f"the {listed.total} test images of {data.root} are not those of the entry (images_sha256)"])
    words, wrong = [f"weights, {entry['parameters']} parameters", f"nonces: {nonces.origins(entry)}"], []
    low, high = _clean(handover, listed)
    words.append(f"clean {100 * high / listed.total:.4g} of {listed.total} images")
    claimed_clean, rounded = entry["clean"] * listed.total / 100, 1e-6 * listed.total  # per cent to 4 places
    if not low - rounded <= claimed_clean <= high + rounded:
        wrong.append(f"clean is {100 * high / listed.total:.4g}, not {entry['clean']}")
    wrong += shares(entry, claimed)
    if wrong:
        return Found(words, wrong)
    words.append(f"certified again {_words(served_dtype)}; the entry speaks {_words(served_in(entry))}")
    picked = frozenset(random.SystemRandom().sample(range(listed.total), min(sample, listed.total)))
    for norm in entry["curves"]:
        rows = list(_rows(entry, norm, handover, listed, picked, served_dtype, progress))
        for said, fault in _held(entry, norm, rows, listed.total):
            words.append(said)
            wrong += [fault] if fault else []
        wrong += forged(norm, rows, claimed, entry["method"])
    return Found(words, wrong)


def _words(served_dtype: str | None) -> str:
    return f"of the model as served in {served_dtype}" if served_dtype else "of the float64 function"


def _weights(entry: Entry, handover: Path) -> Iterator[str]:
    digest = zoo.handover.weights_sha256(handover)
    if digest != entry["weights_sha256"]:
        yield f"the weights in {handover} have sha256 {digest[:16]}..., not {str(entry['weights_sha256'])[:16]}..."
        return
    count = parameters_of(zoo.handover.read_config(handover)["model"])
    if count != entry["parameters"]:
        yield f"the model has {count} parameters, not {entry['parameters']}"


def _clean(handover: Path, listed: images.ImageList) -> tuple[int, int]:
    """How many images are classified correctly, at least and at most: ties count for both."""
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
    served_dtype: str | None,
    progress: Progress,
) -> Iterator[Row]:
    """The stage's own rows of the picked images, with a nonce that is drawn now."""
    grid = tuple(eps for of, eps, _ in points(entry) if of == norm)
    settings = Settings(
        method=entry["method"],
        norm=norm,
        eps=grid,
        headline_eps=grid[0],
        attack=replace(DEFAULT_ATTACK, steps=_steps(entry, norm)),
        nonce=lanczos.new_nonce(),
        served_dtype=served_dtype,
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
    """Of the entry's PGD; ours where it says another attack."""
    names = [str(point["attack"]) for of, _, point in points(entry) if of == norm]
    steps = [int(name.removeprefix("PGD-")) for name in names if name.removeprefix("PGD-").isdecimal()]
    return min(max(steps, default=DEFAULT_ATTACK.steps), 1000)


def _held(entry: Entry, norm: str, rows: list[Row], total: int) -> Iterator[tuple[str, str | None]]:
    """(what was seen, what is wrong with the claim) at every eps."""
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
        if claim is not None and not likely(certified, n, claim * total / 100, total, both=True):
            fault = f"{where}: {certified} of {n} images are certified again, {claim} % are claimed"
        elif attacked is not None and not likely(survive, n, attacked * total / 100, total, both=False):
            fault = f"{where}: {survive} of {n} images survive an attack, {attacked} % are claimed"
        yield said, fault


def likely(seen: int, n: int, claimed: float, total: int, *, both: bool) -> bool:
    """Whether `seen` of n drawn images may be of a claim of so many of `total`, give or take ALLOWED: not too few, and,
    if `both`, not too many."""
    slack = ALLOWED * total
    fewest, most = (min(total, max(0, round(claimed + sign * slack))) for sign in (-1, 1))
    enough = _tail(fewest, n, total, range(seen + 1)) >= DOUBT
    return enough and (not both or _tail(most, n, total, range(seen, n + 1)) >= DOUBT)


def _tail(marked: int, n: int, total: int, values: range) -> float:
    """P(k in values), k of n drawn images being among the `marked` of `total`."""
    return sum(comb(marked, k) * comb(total - marked, n - k) for k in values) / comb(total, n)
