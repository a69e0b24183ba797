"""100,000 attacks, each at the certified radius of its image: none may succeed.

A million, and the whole zoo: `python -m benchmarks.trials`.
"""

import pytest

from certify import certified_radius
from certify.shared.bake import bake
from tests.tools.ascent import ascend, margin_loss
from tests.tools.small_models import PARTS
from tests.tools.trials import METHODS, NORMS, STEPS, TRAINED, WEIGHTS, Subject, outcomes

IMAGES, STARTS = 4, 128
OTHERS = ("l2_vit_s_w768", "scsa_vit_s_w768")  # kinds of attention with rules of their own
SUBJECTS = [Subject(kind, weights, seed) for seed, weights in enumerate(WEIGHTS) for kind in (*PARTS, *OTHERS)]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_no_attack_of_a_hundred_thousand_beats_a_certificate() -> None:
    trials = dict.fromkeys(((method, norm) for method in METHODS for norm in NORMS), 0)
    for subject in SUBJECTS:
        for outcome in outcomes(subject, IMAGES, STARTS):
            beaten_B = outcome.beaten_B
            assert not beaten_B.any(), f"{subject}, {outcome.method}, {outcome.norm}: {outcome.radius_B[beaten_B]}"
            trials[outcome.method, outcome.norm] += outcome.worth * STARTS
    assert sum(trials.values()) >= 100_000
    assert min(trials.values()) >= 2_000, trials


@pytest.mark.slow
def test_the_attack_finds_what_is_there() -> None:
    """The same trials beyond the certificate do succeed.

    At 1.5 times the radius some classes of nearly linear models change. Every model has a radius, at most 16 times the
    certified one, at which they do.
    """
    for kind in PARTS:
        subject = Subject(kind, TRAINED, 0)
        model, x = subject.model(), subject.images(40)
        y = model(x).argmax(-1)
        radius_B, loss = certified_radius(model, x, y, method="best"), margin_loss(bake(model), y)
        assert (ascend(loss, x.double(), 16 * radius_B, steps=STEPS, starts=4) > 0).float().mean() >= 0.5, kind
        if kind == "smooth":
            assert (ascend(loss, x.double(), 1.5 * radius_B, steps=STEPS, starts=4) > 0).any()
