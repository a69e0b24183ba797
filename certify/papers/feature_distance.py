"""The distance between two samples of features: the proxy A-distance, and both samples in one plane.

    d_A = 2 (1 - 2 err),     err = error on held-out images of a linear classifier that tells clean from attacked

(Ben-David et al. 2006, 2010.) 0 means that it never can tell them apart, 2 that it always can. d_A is an estimate: the
distance is defined by the best linear classifier on the whole distribution, whereas this one was fitted by logistic
regression to some of the images. Only this file of the package imports scikit-learn.

Letters: N images, D width of the features.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from certify.rows.intervals import wilson

FOLDS = 5
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """A distance estimate; `error` is that of the classifiers on held-out images.

    The 95 % interval covers the choice of the held-out images, but not that of the training images. It counts an image
    and its attacked version as one trial.
    """

    error: float
    images: int

    @property
    def value(self) -> float:
        return from_error(self.error)

    @property
    def interval(self) -> tuple[float, float]:
        low, high = wilson(self.error, self.images)
        return from_error(high), from_error(low)


def from_error(error: float) -> float:
    """Return d_A in [0, 2]; an error above 1/2 is due to chance and counts as 1/2."""
    return 2 * (1 - 2 * min(max(error, 0.0), 0.5))


def a_distance(clean_ND: Array, attacked_ND: Array, seed: int = 0) -> Distance:
    """Return d_A of the clean and attacked features of the same N images, row by row; N is at least `FOLDS`.

    Every image is held out once, in FOLDS folds. Its two versions are always in the same fold, so that no image can be
    recognised. Features are standardised by those of the training images. The result does not depend on the order of
    the images.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    order = _own_order(np.hstack([clean_ND, attacked_ND]), seed)
    images = len(order)
    features = np.vstack([clean_ND[order], attacked_ND[order]])
    attacked = np.repeat([0, 1], images)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    answers = cross_val_predict(
        classifier, features, attacked, groups=np.tile(np.arange(images), 2), cv=GroupKFold(FOLDS)
    )
    return Distance(error=float((answers != attacked).mean()), images=images)


def _own_order(pairs_NF: Array, seed: int) -> NDArray[np.intp]:
    """Return an order that depends only on the images: sorted by content, then shuffled."""
    return np.lexsort(pairs_NF.T)[np.random.default_rng(seed).permutation(len(pairs_NF))]


def plane(clean_ND: Array, attacked_ND: Array, perplexity: float, seed: int = 0) -> Array:
    """Return the t-SNE (van der Maaten and Hinton 2008) of all 2N features together, the clean ones first: (2N, 2).

    It starts from the first two principal components. Only neighbourhoods are meaningful, not distances or sizes.
    """
    from sklearn.manifold import TSNE

    features = np.vstack([clean_ND, attacked_ND])
    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(features), dtype=float)
